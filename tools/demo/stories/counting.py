"""Stories about collections, containers and sharing things out."""

from __future__ import annotations

from tools.demo.stories.arithmetic import divide, minus, percent, plus, times
from tools.demo.stories.draw import Draw, Story, plural


def boxes_given_away(d: Draw) -> Story:
    who, friend, a, box = d.person(), d.person(), d.things("collected"), d.thing("boxes")
    n, each = d.number(2, 15), d.number(3, 40)
    total = times(n, each)
    given = d.number(1, total - 1)
    left = minus(total, given)
    return Story(
        f"{who} has {n} {plural(box)} with {each} {a} in each {box}. {who.He} gives {given} {a} to {friend}. "
        f"How many {a} does {who.he} have left?",
        (f"{who} starts with {total.work} {a}.", f"After that {who.he} has {left.work} {a} left."),
        left,
    )


def three_collections(d: Draw) -> Story:
    x, y, z, a = d.person(), d.person(), d.person(), d.things("collected")
    n, more, less = d.number(30, 400), d.number(5, 200), d.number(2, 29)
    second = plus(n, more)
    third = minus(second, less)
    total = plus(n, second, third)
    return Story(
        f"{x} has {n} {a}. {y} has {more} more {a} than {x}, and {z} has {less} fewer than {y}. "
        f"How many {a} do they have {d.one('together', 'in total', 'altogether')}?",
        (
            f"{y} has {second.work} {a}.",
            f"{z} has {third.work} {a}.",
            f"Together they have {total.work} {a}.",
        ),
        total,
    )


def times_as_many(d: Draw) -> Story:
    x, y, a = d.person(), d.person(), d.things("collected")
    word, factor = d.one(("twice", 2), ("three times", 3), ("four times", 4), ("five times", 5))
    n = d.number(4, 150)
    other = times(n, factor)
    total = plus(n, other)
    return Story(
        f"{x} has {n} {a} and {y} has {word} as many. How many {a} do {x} and {y} have "
        f"{d.one('together', 'in total')}?",
        (f"{y} has {other.work} {a}.", f"Together they have {total.work} {a}."),
        total,
    )


def half_then_more(d: Draw) -> Story:
    who, friend, a = d.person(), d.person(), d.things("collected")
    word, part = d.one(("half", 2), ("a third", 3), ("a quarter", 4), ("a fifth", 5))
    share, found = d.number(3, 90), d.number(2, 90)
    start = share * part
    given = divide(start, part)
    left = minus(start, given)
    total = plus(left, found)
    return Story(
        f"{who} has {start} {a}. {who.He} gives {word} of them to {friend} and then "
        f"{d.one('finds', 'buys', 'gets')} {found} more. "
        f"How many {a} does {who.he} have now?",
        (f"{who} gives away {given.work} {a}.", f"{who.He} keeps {left.work} {a}.",
         f"Now {who.he} has {total.work} {a}."),
        total,
    )  # fmt: skip


def packed_evenly(d: Draw) -> Story:
    who, a, box = d.person(), d.things("baked"), d.thing("boxes")
    n, size, eaten = d.number(3, 40), d.number(2, 9), d.number(2, 30)
    made = n * size + eaten
    rest = minus(made, eaten)
    count = divide(rest, size)
    return Story(
        f"{who} bakes {made} {a}. {who.His} family eats {eaten} of them, and {who.he} packs the rest into "
        f"{plural(box)} of {size}. "
        f"How many {plural(box)} does {who.he} {d.one('fill', 'need')}?",
        (f"There are {rest.work} {a} to pack.", f"{who.He} fills {count.work} {plural(box)}."),
        count,
    )


def trays_sold(d: Draw) -> Story:
    who, a = d.person(), d.things("baked")
    trays, each, price = d.number(3, 12), d.number(6, 24), d.number(2, 5)
    made = times(trays, each)
    left = d.number(2, 15)
    sold = minus(made, left)
    money = times(sold, price)
    return Story(
        f"{who} bakes {trays} trays of {a} with {each} on each tray. At the end of the day {left} {a} are "
        f"left. "
        f"Each one sold for ${price}. How much money did {who.he} make?",
        (f"{who} baked {made.work} {a}.", f"{who.He} sold {sold.work} of them.",
         f"{who.He} made {money.work} dollars."),
        money,
    )  # fmt: skip


def shelves(d: Draw) -> Story:
    where = d.one("library", "school", "bookstore")
    shelves_, each, lent, back = d.number(4, 30), d.number(12, 60), d.number(11, 40), d.number(2, 10)
    total = times(shelves_, each)
    after = minus(total, lent)
    now = plus(after, back)
    return Story(
        f"A {where} has {shelves_} shelves with {each} books on each. On Monday {lent} books are taken "
        f"out and {back} are brought back. "
        f"How many books are on the shelves {d.one('now', 'after that', 'in the end')}?",
        (f"At first there are {total.work} books.", f"After some are taken out there are {after.work} books.",
         f"In the end there are {now.work} books."),
        now,
    )  # fmt: skip


def shared_equally(d: Draw) -> Story:
    x, y, a = d.person(), d.person(), d.things("fruit")
    children, each = d.number(3, 9), d.number(3, 30)
    total = children * each
    first = d.number(2, total - 2)
    second = total - first
    both = plus(first, second)
    share = divide(both, children)
    return Story(
        f"{x} picks {first} {a} and {y} picks {second}. They share them equally "
        f"{d.one('among', 'between')} {children} children. "
        f"How many {a} does each child get?",
        (f"Together they have {both.work} {a}.", f"Each child gets {share.work} {a}."),
        share,
    )


def percent_of_fruit(d: Draw) -> Story:
    who, a = d.person(), d.things("fruit")
    n, bad, sold = d.number(20, 400, 20), d.number(5, 50, 5), d.number(2, 9)
    rotten = percent(bad, n)
    good = minus(n, rotten)
    left = minus(good, sold)
    return Story(
        f"{who} picks {n} {a}, but {bad}% of them are {d.one('bad', 'too small', 'rotten')}. {who.He} "
        f"eats {sold} of the good ones. "
        f"How many good {a} are left?",
        (
            f"The bad ones are {rotten.work} {a}.",
            f"So {good.work} {a} are good.",
            f"In the end {left.work} are left.",
        ),
        left,
    )


def rows_of_seats(d: Draw) -> Story:
    where = d.one("theater", "cinema", "hall", "stadium")
    rows, seats = d.number(8, 40), d.number(10, 40)
    total = times(rows, seats)
    empty = d.number(5, 70)
    taken = minus(total, empty)
    children = d.number(2, min(90, taken - 2))
    adults = minus(taken, children)
    return Story(
        f"A {where} has {rows} rows of {seats} seats. Tonight {empty} seats are empty, and {children} of "
        f"the visitors are children. "
        f"How many visitors are adults?",
        (f"The {where} has {total.work} seats.", f"There are {taken.work} visitors.",
         f"So {adults.work} visitors are adults."),
        adults,
    )  # fmt: skip


def colours(d: Draw) -> Story:
    who, a, box = d.person(), d.things("collected"), d.thing("boxes")
    red, more, factor = d.number(5, 80), d.number(3, 60), d.number(2, 4)
    blue, green = plus(red, more), times(red, factor)
    total = plus(red, blue, green)
    return Story(
        f"A {box} holds {red} red {a}, {more} more blue ones than red ones, and {factor} times as many "
        f"green ones as red ones. "
        f"How many {a} does {who} count in the {box}?",
        (
            f"There are {blue.work} blue {a}.",
            f"There are {green.work} green {a}.",
            f"In all {who} counts {total.work} {a}.",
        ),
        total,
    )


def bouquets(d: Draw) -> Story:
    who, a, b = d.person(), d.things("flowers"), d.things("flowers")
    n, x, y = d.number(3, 25), d.number(2, 9), d.number(2, 9)
    each = plus(x, y)
    total = times(n, each)
    spare = d.number(2, 60)
    has = total + spare
    left = minus(has, total)
    return Story(
        f"{who} has {has} flowers. {who.He} ties {n} bouquets, each with {x} {a} and {y} {b}. How many "
        f"flowers are left over?",
        (f"A bouquet takes {each.work} flowers.", f"All bouquets take {total.work} flowers.",
         f"So {left.work} flowers are left."),
        left,
    )  # fmt: skip


def eggs(d: Draw) -> Story:
    who = d.person()
    hens, each, days, size = d.number(4, 30), d.number(2, 4), d.number(2, 7), d.one(6, 10, 12)
    cartons = hens * each * days // size + 1
    per_day = times(hens, each)
    laid = times(per_day, days)
    room = times(cartons, size)
    spare = minus(room, laid)
    return Story(
        f"{who} keeps {hens} hens, and each lays {each} eggs a day. After {days} days {who.he} puts all "
        f"eggs into {cartons} cartons "
        f"that hold {size} eggs each. How many places stay empty?",
        (f"The hens lay {per_day.work} eggs a day.", f"In {days} days they lay {laid.work} eggs.",
         f"The cartons hold {room.work} eggs.", f"So {spare.work} places stay empty."),
        spare,
    )  # fmt: skip


def lost_and_doubled(d: Draw) -> Story:
    who, a = d.person(), d.things("collected")
    n, lost, bought = d.number(30, 400), d.number(2, 29), d.number(2, 150)
    rest = minus(n, lost)
    more = plus(rest, bought)
    twice = times(more, 2)
    return Story(
        f"{who} has {n} {a}, {d.one('loses', 'gives away', 'sells')} {lost} and buys {bought}. A year "
        f"later {who.he} has twice as many as that. "
        f"How many {a} does {who.he} have then?",
        (f"At first {who.he} keeps {rest.work} {a}.", f"Then {who.he} has {more.work} {a}.",
         f"A year later {who.he} has {twice.work} {a}."),
        twice,
    )  # fmt: skip


def legs(d: Draw) -> Story:
    who, a = d.person(), d.one("goats", "cows", "horses", "sheep", "dogs")
    b = d.one("chickens", "ducks", "geese", "hens")
    n, m = d.number(3, 60), d.number(3, 90)
    four, two = times(n, 4), times(m, 2)
    total = plus(four, two)
    return Story(
        f"On {who.his} farm {who} has {n} {a} and {m} {b}. How many legs do these animals have "
        f"{d.one('in all', 'in total', 'together')}?",
        (
            f"The {a} have {four.work} legs.",
            f"The {b} have {two.work} legs.",
            f"Together they have {total.work} legs.",
        ),
        total,
    )


def album(d: Draw) -> Story:
    who, a = d.person(), d.one("stamps", "cards", "photos", "stickers")
    pages, each, extra = d.number(5, 40), d.number(4, 16), d.number(2, 90)
    room = times(pages, each)
    has = d.number(2, room - 2)
    total = plus(has, extra)
    if total >= room:
        extra = room - has - 1
        total = plus(has, extra)
    free = minus(room, total)
    return Story(
        f"An album has {pages} pages with room for {each} {a} on each page. {who} owns {has} {a} and gets "
        f"{extra} more. "
        f"How many more {a} still fit into the album?",
        (
            f"The album has room for {room.work} {a}.",
            f"{who} has {total.work} {a}.",
            f"So {free.work} more fit.",
        ),
        free,
    )


STORIES = (
    boxes_given_away, three_collections, times_as_many, half_then_more, packed_evenly, trays_sold, shelves,
    shared_equally, percent_of_fruit, rows_of_seats, colours, bouquets, eggs, lost_and_doubled, legs, album,
)  # fmt: skip
