"""Numbers that change in many different places: each scene has its own words for what comes, goes and is asked."""

from __future__ import annotations

from dataclasses import dataclass

from tools.demo.stories.arithmetic import minus, plus, times
from tools.demo.stories.draw import Story
from tools.demo.wording import Wording, cap, plural_of


@dataclass(frozen=True)
class Scene:
    """Alternatives apart by `|`. {n}: the number, {k}: how many of {m} each."""

    unit: str
    start: str
    gains: str
    losses: str
    asked: str
    grouped: str = ""


SCENES = (
    Scene("people", "There are {n} people on a platform|{n} people wait on the platform|A platform has {n} people on it",
          "{n} more arrive|{n} people come down the stairs|another {n} people join them",
          "{n} of them board a train|{n} people leave|{n} walk away",
          "How many people are on the platform now|How many people are still waiting|How many people are left",
          "{k} train cars with {m} people in each arrive"),
    Scene("people", "An elevator carries {n} people|{n} people are in an elevator",
          "on the next floor {n} step in|{n} more people get in|{n} people enter",
          "{n} people get out|on the third floor {n} people step out|{n} of them exit",
          "How many people are in the elevator now|How many people ride on"),
    Scene("ducks", "{n} ducks swim in a lake|There are {n} ducks on a pond|A pond has {n} ducks",
          "{n} more fly in|{n} ducks join them|{n} ducklings hatch", "{n} fly away|{n} ducks leave|{n} of them swim off",
          "How many ducks are there now|How many ducks are on the water|How many ducks remain"),
    Scene("guests", "A hotel has {n} guests|{n} guests are staying in a hotel", "{n} new guests check in|{n} guests arrive",
          "{n} guests check out|{n} of the guests leave|{n} go home",
          "How many guests are in the hotel then|How many guests stay|What is the number of guests now",
          "{k} vans with {m} guests each arrive"),
    Scene("bottles", "A fridge holds {n} bottles|There are {n} bottles in the fridge",
          "{n} bottles are put in|somebody adds {n} bottles|{n} more are bought", "{n} are drunk|{n} bottles are taken out",
          "How many bottles are in the fridge now|How many bottles are left", "{k} cases of {m} bottles are added"),
    Scene("books", "A bookshop has {n} books in stock|{n} books lie on a table|A shelf carries {n} books",
          "{n} new books are delivered|{n} books are added|{n} more come in",
          "{n} books are sold|customers buy {n} of them|{n} are returned to the publisher",
          "How many books are in stock now|How many books are left|How many books are there then",
          "{k} parcels with {m} books each arrive"),
    Scene("points", "A team has {n} points|{n} points are on the board|In a game, a player has {n} points",
          "{n} points are scored|the next round brings {n} points|{n} points are added",
          "{n} points are lost|a penalty costs {n} points|{n} points are taken away",
          "What is the score now|How many points are there in the end|What is the final score",
          "{k} hits of {m} points each follow"),
    Scene("dollars", "A bank account holds ${n}|There is ${n} in an account|The balance of an account is ${n}",
          "${n} is paid in|a deposit of ${n} is made|{n} dollars come in", "${n} is withdrawn|a bill of ${n} is paid|{n} "
          "dollars are taken out", "What is the balance now|How much money is in the account|How many dollars are left",
          "{k} payments of ${m} each come in"),
    Scene("emails", "An inbox has {n} emails|There are {n} unread messages", "{n} new ones arrive|{n} more come in",
          "{n} are deleted|{n} are answered and removed|{n} of them are moved away",
          "How many are in the inbox now|How many messages are there then"),
    Scene("songs", "A playlist has {n} songs|There are {n} songs on a list", "{n} songs are added|another {n} songs follow",
          "{n} songs are removed|{n} of the songs are deleted", "How many songs are on it now|How many songs remain",
          "{k} albums with {m} songs each are added"),
    Scene("visitors", "A museum has {n} visitors inside|{n} visitors are in the museum",
          "{n} more come in|{n} visitors enter|a class of {n} arrives", "{n} leave|{n} visitors go home",
          "How many visitors are inside now|How many visitors are in the museum then", "{k} groups of {m} visitors enter"),
    Scene("puppies", "A kennel has {n} puppies|{n} puppies live in a shelter", "{n} puppies are born|{n} more are brought in",
          "{n} are adopted|{n} puppies find a home|families take {n} of them",
          "How many puppies are left|How many puppies live there now"),
    Scene("students", "A school has {n} students|{n} students take a course|There are {n} students in a club",
          "{n} new students join|{n} students enroll|{n} more sign up",
          "{n} students quit|{n} of them drop out|{n} students move away",
          "How many students are there now|How many students does that leave|How many students are in it then",
          "{k} classes of {m} students each join"),
    Scene("liters", "A barrel contains {n} liters|There are {n} liters of water in a pool|A container holds {n} liters",
          "{n} liters are poured in|rain adds {n} liters|{n} liters are pumped in",
          "{n} liters are used|{n} liters evaporate|{n} liters flow out",
          "How many liters are in it now|How much water is left, in liters|How many liters remain",
          "{k} buckets of {m} liters each are poured in"),
    Scene("meters", "A rope is {n} meters long|A wire has a length of {n} meters|A roll holds {n} meters of cloth",
          "{n} meters are tied on|a piece of {n} meters is added", "{n} meters are cut off|{n} meters are used",
          "How many meters are left|How long is it now|What length remains"),
    Scene("trees", "A park has {n} trees|{n} trees stand in an orchard|There are {n} trees in the park",
          "{n} trees are planted|workers plant {n} more", "{n} trees are cut down|a storm destroys {n} of them|{n} fall over",
          "How many trees are there now|How many trees will the park have|How many trees remain",
          "{k} rows of {m} trees are planted"),
    Scene("screws", "A toolbox contains {n} screws|{n} screws are in a box", "{n} screws are added|{n} more are put in",
          "{n} screws are used|{n} get lost|{n} turn out bent and are thrown away",
          "How many screws are in the box now|How many good screws are left", "{k} bags of {m} screws are put in"),
    Scene("soldiers", "A ship has a crew of {n}|{n} sailors are on a ship", "{n} sailors come aboard|{n} more join the crew",
          "{n} sailors leave the ship|{n} go ashore", "How many are on board now|How large is the crew then"),
    Scene("fans", "{n} fans sit in a stadium|A stadium holds {n} fans", "{n} fans arrive late|{n} more take their seats",
          "{n} leave early|at half time {n} fans go home", "How many fans are still there|How many fans see the end",
          "{k} buses bring {m} fans each"),
    Scene("tables", "A factory has {n} tables in storage|A warehouse stores {n} tables",
          "{n} tables are made|the workers finish {n} more", "{n} tables are shipped|{n} are sold|trucks take {n} away",
          "How many tables are stored now|How many tables are left in storage", "{k} trucks bring {m} tables each"),
    Scene("degrees", "In the morning it is {n} degrees|The temperature is {n} degrees",
          "it rises by {n} degrees|it gets {n} degrees warmer", "it falls by {n} degrees|it gets {n} degrees colder",
          "What is the temperature now|How many degrees is it then"),
    Scene("monkeys", "A zoo has {n} monkeys|{n} monkeys live in a zoo", "{n} monkeys are born|{n} come from another zoo",
          "{n} are given to other zoos|{n} monkeys escape", "How many monkeys are in the zoo now|How many monkeys are left"),
    Scene("flowers", "A vase holds {n} flowers|A florist has {n} flowers|{n} flowers bloom in a field",
          "{n} flowers are added|{n} more open", "{n} wilt|{n} flowers are picked|{n} flowers are sold",
          "How many flowers are left|How many flowers are there now", "{k} bunches of {m} flowers are added"),
    Scene("seats", "A theater has {n} free seats|{n} seats are still free in a hall", "{n} seats become free|{n} people "
          "give back their tickets", "{n} seats are sold|{n} seats are taken", "How many seats are free now|How many free "
          "seats remain"),
    Scene("grams", "A bag contains {n} grams of flour|There are {n} grams of sugar in a bowl", "{n} grams are added|the "
          "cook adds {n} grams", "{n} grams are used|{n} grams go into a cake|{n} grams are spilled",
          "How many grams are left|How many grams are in it now"),
    Scene("bricks", "A pile has {n} bricks|{n} bricks lie on a site", "{n} bricks are delivered|{n} more are unloaded",
          "{n} are used for a wall|{n} bricks break|{n} are carried away", "How many bricks are there now|How many bricks "
          "are left", "{k} carts with {m} bricks each are unloaded"),
    Scene("minutes", "A task is planned for {n} minutes|A film lasts {n} minutes", "it takes {n} minutes longer|{n} minutes "
          "are added", "{n} minutes are saved|{n} minutes are cut", "How many minutes does it take now|How long is it, in "
          "minutes"),
    Scene("birds", "{n} birds sit on a roof|A tree has {n} birds in it", "{n} birds land|{n} more birds come",
          "{n} birds take off|a cat scares away {n}|{n} fly off", "How many birds are there now|How many birds stay"),
)  # fmt: skip
_LINKS = ("", "", "Then ", "Later ", "After that, ", "Next, ", "In the afternoon, ", "During the day, ", "By evening, ",
          "An hour later, ", "Soon ", "Suddenly ")  # fmt: skip


def scene(d: Wording) -> Story:
    s = d.one(*SCENES)
    n = d.amount(4, 400)
    parts, steps, now = [d.one(*s.start.split("|")).format(n=n)], [], n
    for _ in range(d.one(1, 2, 2, 3)):
        loss, k, m = d.chance(0.5) and now > 2, d.number(2, 12), d.number(2, 25)
        if s.grouped and d.chance(0.2):
            product = times(k, m)
            said, result = s.grouped.format(k=k, m=m), plus(now, product)
            steps.append(f"{product.work} {s.unit}")
        elif loss:
            change = d.number(1, now - 1) if d.chance(0.5) else d.number(1, min(now - 1, 20))
            said, result = d.one(*s.losses.split("|")).format(n=change), minus(now, change)
        else:
            change = d.amount(2, 200)
            said, result = d.one(*s.gains.split("|")).format(n=change), plus(now, change)
        steps.append(f"{result.work} {s.unit}")
        now = int(result)
        if d.chance(0.25):
            parts[-1] += d.one(" and ", ", and ", ", then ", ", but ") + said
        else:
            parts.append(cap(d.one(*_LINKS) + said))
    return Story(". ".join([*parts, d.one(*s.asked.split("|"))]) + "?", tuple(steps), now)


_ARRAYS = (
    ("train", "car", "seat", "seats"), ("house", "floor", "window", "windows"), ("week", "day", "lesson", "lessons"),
    ("building", "floor", "room", "rooms"), ("orchestra", "row", "chair", "chairs"), ("album", "page", "photo", "photos"),
    ("garden", "bed", "plant", "plants"), ("ship", "deck", "cabin", "cabins"), ("store", "aisle", "shelf", "shelves"),
    ("league", "team", "player", "players"), ("book", "chapter", "page", "pages"), ("field", "row", "pumpkin", "pumpkins"),
    ("hospital", "ward", "bed", "beds"), ("camp", "tent", "child", "children"), ("city", "park", "bench", "benches"),
    ("restaurant", "table", "guest", "guests"), ("stall", "box", "mango", "mangos"), ("year", "month", "meeting", "meetings"),
)  # fmt: skip


def arrays(d: Wording) -> Story:
    """Parts of equal size, two or three levels deep, less or more a few."""
    whole, part, _, units = d.one(*_ARRAYS)
    k, m, j, few = d.number(2, 20), d.number(2, 40), d.number(2, 6), d.number(1, 15)
    total = times(k, m)
    steps = [f"{total.work} {units}"]
    parts = plural_of(part)
    text = d.one(
        f"A {whole} has {k} {parts}. Every {part} has {m} {units}.", f"There are {k} {parts} in a {whole}, and {m} {units} "
        f"in each {part}.", f"Each {part} of a {whole} has {m} {units}, and there are {k} {parts}.",
        f"A {whole} consists of {k} {parts} with {m} {units} each.", f"A {whole} with {k} {parts} has {m} {units} per {part}.",
    )  # fmt: skip
    ask = d.one(f"How many {units} are there?", f"How many {units} does the {whole} have?", f"What is the total number of "
                f"{units}?", f"How many {units} is that in all?")  # fmt: skip
    kind = d.number(0, 3)
    if kind == 1:
        result = times(total, j)
        steps.append(f"{result.work} {units}")
        ask = d.one(
            f"How many {units} do {j} such {plural_of(whole)} have?",
            f"How many {units} are in {j} {plural_of(whole)}?",
        )
        return Story(f"{text} {ask}", tuple(steps), result)
    if kind == 2 and few < total:
        state = d.one("empty", "broken", "missing", "free", "closed", "damaged")
        result = minus(total, few)
        steps.append(f"{result.work} {units}")
        text += d.one(
            f" {few} of them are {state}.", f" But {few} {units} are {state}.", f" Only {few} are {state}."
        )
        ask = d.one(f"How many are not {state}?", f"How many {units} are not {state}?")
        return Story(f"{text} {ask}", tuple(steps), result)
    if kind == 3:
        result = plus(total, few)
        steps.append(f"{result.work} {units}")
        text += d.one(f" There are {few} more {units} elsewhere.", f" {few} {units} are added.", f" Besides, there are {few} "
                      f"spare {units}.")  # fmt: skip
        ask = d.one(f"How many {units} are there altogether?", f"How many {units} is that in total?")
        return Story(f"{text} {ask}", tuple(steps), result)
    return Story(f"{text} {ask}", tuple(steps), total)


def fees(d: Wording) -> Story:
    """A fixed amount and one for every piece; two kinds of buyers."""
    base, rate, n, m, p = d.number(3, 80), d.number(2, 25), d.number(2, 30), d.number(2, 20), d.number(2, 30)
    per = times(rate, n)
    if d.chance(0.5):
        what, unit, units = d.one(("A taxi", "km", "km"), ("Renting a bike", "hour", "hours"), ("A plumber", "hour", "hours"),
                                  ("A gym", "visit", "visits"), ("A boat", "hour", "hours"), ("Renting a car", "day", "days"),
                                  ("A printer shop", "page", "pages"), ("A hall", "guest", "guests"))  # fmt: skip
        total = plus(base, per)
        text = d.one(
            f"{what} costs ${base} plus ${rate} per {unit}.", f"{what} costs a fixed ${base} and then ${rate} for every "
            f"{unit}.", f"For {what.lower()} one pays ${rate} per {unit} and a fee of ${base}.",
        )  # fmt: skip
        ask = d.one(
            f"How much is it for {n} {units}?",
            f"What do {n} {units} cost?",
            f"What is the price for {n} {units}?",
        )
        return Story(f"{text} {ask}", (f"{per.work} dollars", f"{total.work} dollars"), total)
    second = times(m, p)
    total = plus(per, second)
    what, one, two = d.one(
        ("A boat ride", "adults", "students"), ("Entry to a pool", "members", "guests"), ("A show", "seniors", "kids"),
        ("Lunch", "teachers", "pupils"), ("A museum tour", "tourists", "locals"), ("A ride", "grown-ups", "kids"),
    )  # fmt: skip
    text = d.one(f"{what} costs ${rate} for {one} and ${p} for {two}.", f"{cap(one)} pay ${rate} for {what.lower()}, {two} "
                 f"pay ${p}.", f"{what} is ${rate} for {one}. For {two} it is ${p}.")  # fmt: skip
    ask = d.one(f"How much do {n} {one} and {m} {two} pay?", f"What is the cost for {n} {one} and {m} {two}?", f"How much "
                f"money is taken from {n} {one} and {m} {two}?")  # fmt: skip
    return Story(
        f"{text} {ask}", (f"{per.work} dollars", f"{second.work} dollars", f"{total.work} dollars"), total
    )


STORIES = (scene, scene, scene, arrays, arrays, fees)
