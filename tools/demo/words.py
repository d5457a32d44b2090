"""Words without end: made-up ones, which a model can only copy, and common ones in any order."""

from __future__ import annotations

from tools.demo.stories.draw import Person
from tools.demo.wording import HELDOUT_NOUNS, Wording, cap, plural_of

# Whole words that only held-out conversations use: things, tools and keys.
KEPT_OUT = frozenset(
    (
        *HELDOUT_NOUNS,
        *map(plural_of, HELDOUT_NOUNS),
        "arithmetic",
        "converter",
        "buyer",
        "article",
        "pieces",
        "location",
    )
)

_ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sk sl sm sn sp st str t th tr v w y z"
).split()
_VOWELS = "a e i o u a e i o u ai ea ee ia ie oa oo ou y".split()
_CODAS = ("", "", "", "b", "ck", "d", "f", "g", "k", "l", "ll", "lt", "m", "mp", "n", "nd", "ng", "nk", "nt", "p", "r", "rd", "rn",
          "rt", "s", "sh", "ss", "st", "t", "th", "tt", "x", "z")  # fmt: skip
_ENDINGS = (
    "",
    "",
    "",
    "er",
    "ing",
    "ed",
    "ly",
    "ion",
    "al",
    "y",
    "le",
    "et",
    "or",
    "ist",
    "ment",
    "ness",
    "able",
    "ic",
)
COMMON = (
    "about above across after again against ago air all almost along already also always among angry animal another any area "
    "arm army around art ask autumn away baby back bad bank base beach beautiful because bed before behind believe best "
    "better between big bit blood body bone both bottom bread bridge bright broad brother build busy business but buy by "
    "call camera camp capital careful case castle cause center certain chance change cheap choose church circle city class "
    "clean clear climb close cloth cloud coast coffee cold color common company complete cook cool copy corner correct "
    "country course cover cross crowd cry culture curious dance danger dark daughter day dead deal deep degree design desk "
    "dinner dirty doctor dream dress drink drive dry during early earth east easy edge effect either empty energy engine "
    "enjoy enough enter equal even evening event ever every exact example expect eye face fact fair fall family famous far "
    "farm fast father fear feel field fight final fine finger fire first flat floor fly follow food foot force foreign "
    "forest forget form forward free fresh friend front full fun future game garden general gentle glad glass god gold "
    "good government grand grass gray great ground group grow guess hair hall hand happy hard hat health hear heart "
    "heat heavy help high hill history hold hole holiday home hope hospital hot hotel house however huge human hungry hurry "
    "ice idea important inside interest iron island job join joke judge jump just keen keep kind king kitchen lady lake land "
    "language large last late laugh law lazy lead learn least leave leg lesson level library lie life light like line lip "
    "list listen little local long look loud love low lucky lunch main man many map march market matter may meal mean meat "
    "meet member memory middle might milk mind minute mirror miss modern moment money month moon morning mother mountain "
    "mouth move music must name narrow nation nature near neck need never new news next nice night noise noon normal north "
    "nose note nothing notice now ocean odd offer office often oil old only open order other outside own page "
    "paint paper parent park part party pass past patient peace people perfect perhaps person picture piece place plain "
    "plan plane plant play pleasant point police polite poor popular position possible power press pretty price prince "
    "private prize problem promise proud public pull pure push queen question quick quiet quite race radio rain raise rather "
    "ready real reason record remember reply report rest result rice rich ride right river road rock roof room rough round "
    "royal rule safe sail salt same sand save school science sea season seat secret sentence serious serve several "
    "shadow shape sharp shine short shoulder shout show side sight sign silent silver simple since sing sister size skill "
    "skin sky sleep slow small smart smell smile smooth snow social soft soil son song soon sound south space speak special "
    "speech speed spring square stage stand star station stay steel step still storm story strange street strong student "
    "study subject such sudden sugar summer sun supper sure surface surprise sweet system table talk tall taste teach team "
    "test thick thin think though thought through tired today together tomorrow tone tonight tool top touch toward tower "
    "town trade train travel trouble true trust try type uncle under until upon useful usual valley value very view village "
    "visit voice wait walk wall war warm wash watch water wave way weak weather week weight west wheel while whole wide wife "
    "wild wind window wine winter wise wish without woman wood word work world worry write wrong yard year yellow yesterday "
    "yet young"
).split()


def made_up(d: Wording) -> str:
    """A word that hardly occurs twice, of one to three syllables."""
    word = "".join(d.one(*_ONSETS) + d.one(*_VOWELS) + d.one(*_CODAS) for _ in range(d.one(1, 1, 2, 2, 3)))
    word += d.one(*_ENDINGS) if len(word) < 7 else ""
    return made_up(d) if word in KEPT_OUT else word


def any_word(d: Wording) -> str:
    return made_up(d) if d.chance(0.4) else d.one(*COMMON)


def phrase(d: Wording, most: int) -> str:
    """Up to `most` words that mean nothing."""
    return " ".join(any_word(d) for _ in range(d.number(0, most)))


def thing(d: Wording) -> str:
    """A noun in the plural, also one that does not exist."""
    if not d.chance(0.35):
        return d.noun()
    return plural_of(any_word(d))


def person(d: Wording) -> Person:
    """Somebody, perhaps with a name that does not exist."""
    if not d.chance(0.25):
        return d.someone()
    he = d.one(("he", "him", "his"), ("she", "her", "her"))
    return Person(cap(made_up(d)), *he)


def name_of(d: Wording) -> str:
    """Of a person, in one word or two."""
    first = d.someone().name if d.chance(0.6) else cap(made_up(d))
    return f"{first} {cap(made_up(d))}" if d.chance(0.15) else first


def identifier(d: Wording, *words: str) -> str:
    """A name such as programs use; of `words`, or of any if there are none."""
    parts = list(words) or [any_word(d) for _ in range(d.one(1, 1, 2, 2, 3))]
    kind = d.number(0, 9)
    if kind < 6:
        return "_".join(parts)
    if kind < 8:
        return parts[0] + "".join(map(cap, parts[1:]))
    return "".join(map(cap, parts)) if kind == 8 else "-".join(parts)
