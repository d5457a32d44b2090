"""Word problems that no training template tells: the held-out templates. They have no worked steps.

They are told as people tell them, each with its own wording; some need two or three steps.
"""

from __future__ import annotations

from tools.demo.stories.draw import Draw, Story, plural


def library(d: Draw) -> Story:
    n, out, back = d.number(40, 300), d.number(5, 38), d.number(2, 30)
    return Story(f"A library has {n} books on one shelf. In the morning, {out} of them are checked out, and in the "
                 f"afternoon {back} are brought back. How many books stand on the shelf in the evening?",
                 (), n - out + back)  # fmt: skip


def pet_store(d: Draw) -> Story:
    n, sick, come = d.number(50, 90), d.number(2, 20), d.number(2, 20)
    return Story(f"A pet store has {n} hamsters for sale. {sick} of the hamsters are ill and go to the vet, and {come} "
                 f"hamsters are sold to children. How many hamsters are there in the pet store now?",
                 (), n - sick - come)  # fmt: skip


def eggs(d: Draw) -> Story:
    who, hens, each, used = d.person(), d.number(3, 15), d.number(2, 6), d.number(1, 5)
    return Story(f"{who} keeps {hens} hens, and each hen lays {each} eggs a week. {who} uses {used} eggs for breakfast "
                 f"every week and sells the rest. How many eggs are sold per week?", (), hens * each - used)  # fmt: skip


def garden_rows(d: Draw) -> Story:
    who, rows, per, dead = d.person(), d.number(3, 15), d.number(4, 20), d.number(2, 10)
    return Story(f"{who} plants {rows} rows of {per} tomato plants. Unfortunately {dead} plants die. How many tomato "
                 f"plants survive?", (), rows * per - dead)  # fmt: skip


def cinema(d: Draw) -> Story:
    adults, kids, p, q = d.number(2, 6), d.number(2, 8), d.number(8, 15), d.number(3, 7)
    return Story(f"A cinema ticket costs ${p} for adults and ${q} for children. How much does a group of {adults} "
                 f"adults and {kids} children pay?", (), adults * p + kids * q)  # fmt: skip


def candy_jar(d: Draw) -> Story:
    who, kids, each, rest = d.person(), d.number(2, 12), d.number(2, 20), d.number(1, 30)
    n = kids * each + rest
    return Story(f"A jar contains {n} candies. {who} gives {each} candies to each of {kids} children. How many candies "
                 f"remain in the jar?", (), rest)  # fmt: skip


def book_pages(d: Draw) -> Story:
    who, days, each, rest = d.person(), d.number(2, 9), d.number(5, 40), d.number(5, 90)
    return Story(f"{who} is reading a book of {days * each + rest} pages. So far {who.he} has read {each} pages a day "
                 f"for {days} days. How many pages does {who.he} still have to read?", (), rest)  # fmt: skip


def parking(d: Draw) -> Story:
    n, gone, come = d.number(20, 120), d.number(5, 19), d.number(2, 30)
    return Story(f"{n} cars are parked in a parking lot. {gone} cars drive away and later {come} other cars arrive. How "
                 f"many cars are in the lot?", (), n - gone + come)  # fmt: skip


def chess_club(d: Draw) -> Story:
    k, boards, broken = d.number(2, 9), d.one(6, 8, 10, 12), d.number(3, 11)
    return Story(f"A chess club owns {k} cupboards, each of which has {boards} chess boards inside. {broken} boards have "
                 f"cracks and cannot be used. How many boards can be used?", (), k * boards - broken)  # fmt: skip


def piggy_bank(d: Draw) -> Story:
    who, n, weekly, weeks, spent = (
        d.person(),
        d.number(5, 60),
        d.number(2, 15),
        d.number(2, 10),
        d.number(2, 20),
    )
    return Story(f"{who}'s piggy bank holds ${n + spent}. Each week {who} puts in ${weekly}. After {weeks} weeks "
                 f"{who.he} takes out ${spent} for a present. How much money is in the piggy bank then?",
                 (), n + weekly * weeks)  # fmt: skip


def relay(d: Draw) -> Story:
    team, laps, length = d.number(3, 8), d.number(2, 9), d.one(100, 200, 300, 400)
    return Story(f"In a relay race each of the {team} runners runs {laps} laps. One lap is {length} meters long. How many "
                 f"meters does the whole team run?", (), team * laps * length)  # fmt: skip


def farm_heads(d: Draw) -> Story:
    cows, more, goats = d.number(5, 60), d.number(2, 40), d.number(2, 30)
    return Story(f"On a farm live {cows} cows. There are {more} more sheep than cows, and there are {goats} goats. How "
                 f"many animals live on the farm?", (), cows + cows + more + goats)  # fmt: skip


def classroom(d: Draw) -> Story:
    rows, per, absent = d.number(3, 8), d.number(3, 9), d.number(1, 8)
    return Story(f"A classroom has {rows} rows of desks with {per} desks in every row. Today all desks but {absent} are "
                 f"taken. How many desks are taken?", (), rows * per - absent)  # fmt: skip


def spring(d: Draw) -> Story:
    rate, minutes, lost = d.number(3, 25), d.number(3, 30), d.number(2, 8)
    return Story(f"From a spring come {rate} liters of water every minute. Somebody watches it for {minutes} minutes and "
                 f"sees {lost} liters seep into the ground. How much water, in liters, did not seep away?",
                 (), rate * minutes - lost)  # fmt: skip


def siblings(d: Draw) -> Story:
    one, two, n, k = d.person(), d.person(), d.number(3, 20), d.number(2, 4)
    return Story(f"{one} is {n} years old, and {one.his} aunt {two} is {k} times as old as {one}. How old is {two}?",
                 (), n * k)  # fmt: skip


def bakery(d: Draw) -> Story:
    trays, per, sold = d.number(3, 12), d.number(6, 24), d.number(4, 17)
    a = d.things("baked")
    return Story(f"A bakery bakes {trays} trays of {a}, {per} on each tray. By noon {sold} {a} have been sold. How many "
                 f"{a} can still be sold?", (), trays * per - sold)  # fmt: skip


def marbles_pooled(d: Draw) -> Story:
    one, two, three = d.person(), d.person(), d.person()
    a, n, m, k = d.things("collected"), d.number(3, 90), d.number(3, 90), d.number(3, 90)
    return Story(f"{one}, {two} and {three} put their {a} together. {one} brings {n}, {two} brings {m} and {three} brings "
                 f"{k}. How many {a} do they have together?", (), n + m + k)  # fmt: skip


def ribbon(d: Draw) -> Story:
    k, each = d.number(2, 12), d.number(3, 40)
    return Story(f"A ribbon that is {k * each} cm long is cut into {k} pieces of the same length. How long is each "
                 f"piece?", (), each)  # fmt: skip


def road_trip(d: Draw) -> Story:
    who, speed, hours, rest = d.person(), d.number(30, 99), d.number(2, 6), d.number(10, 200)
    return Story(f"The way to the sea is {speed * hours + rest} km. {who} has driven for {hours} hours at {speed} km/h. "
                 f"How many kilometers does {who.he} still have to drive?", (), rest)  # fmt: skip


def phone_bill(d: Draw) -> Story:
    base, rate, minutes = d.number(5, 30), d.number(2, 9), d.number(5, 60)
    return Story(f"A phone plan costs ${base} a month plus ${rate} for each extra hour. How much is the bill in a month "
                 f"with {minutes} extra hours?", (), base + rate * minutes)  # fmt: skip


def snack_money(d: Draw) -> Story:
    who, n, k, p = d.person(), d.number(60, 150), d.number(2, 7), d.number(2, 8)
    a = d.things("fruit")
    return Story(f"With ${n} in {who.his} pocket, {who} goes to the market, where {a} cost ${p} each. {who.He} takes {k}. "
                 f"How many dollars are in {who.his} pocket afterwards?", (), n - k * p)  # fmt: skip


def half_gone(d: Draw) -> Story:
    who, a, n = d.person(), d.things("baked"), 2 * d.number(4, 60)
    eaten = d.number(1, n // 2 - 1)
    return Story(f"{who} baked {n} {a}. Half of them went to the neighbors, and the family ate {eaten}. How many {a} are "
                 f"left over?", (), n // 2 - eaten)  # fmt: skip


def boxes_needed(d: Draw) -> Story:
    a, k, m = d.thing("goods"), d.number(3, 12), d.number(4, 40)
    return Story(f"A factory made {k * m} {plural(a)} today. Each carton has room for {k} {plural(a)}. How many cartons "
                 f"does the factory need?", (), m)  # fmt: skip


def fish_tanks(d: Draw) -> Story:
    who, n, m = d.person(), d.number(3, 40), d.number(2, 30)
    return Story(f"In {who}'s aquarium swim {n} goldfish and twice as many guppies. {who} adds {m} snails. How many animals "
                 f"live in the aquarium?", (), 3 * n + m)  # fmt: skip


STORIES = (
    library, pet_store, eggs, garden_rows, cinema, candy_jar, book_pages, parking, chess_club, piggy_bank, relay, farm_heads,
    classroom, spring, siblings, bakery, marbles_pooled, ribbon, road_trip, phone_bill, snack_money, half_gone,
    boxes_needed, fish_tanks,
)  # fmt: skip
