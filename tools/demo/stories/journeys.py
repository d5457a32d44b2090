"""Stories about distances, speeds, fuel, times and sizes."""

from __future__ import annotations

from tools.demo.stories.arithmetic import divide, minus, percent, plus, times
from tools.demo.stories.draw import Draw, Story

_UNITS = ("km", "miles")


def two_speeds(d: Draw) -> Story:
    who, unit = d.person(), d.one(*_UNITS)
    vehicle = d.one("drives", "rides a motorbike", "travels by bus")
    fast, h, slow, k = d.number(40, 95, 5), d.number(2, 6), d.number(12, 38), d.number(2, 6)
    first, second = times(fast, h), times(slow, k)
    total = plus(first, second)
    return Story(
        f"{who} {vehicle} for {h} hours at {fast} {unit} per hour and then cycles for {k} hours at "
        f"{slow} {unit} per hour. How many {unit} does {who.he} {d.one('travel', 'cover')} in total?",
        (f"First {who.he} covers {first.work} {unit}.", f"Then {who.he} cycles {second.work} {unit}.",
         f"In total that is {total.work} {unit}."),
        total,
    )  # fmt: skip


def distance_left(d: Draw) -> Story:
    who, unit, goal = d.person(), d.one(*_UNITS), d.one("coast", "border", "capital", "mountains", "lake")
    speed, hours, left = d.number(20, 95), d.number(2, 8), d.number(5, 250)
    done = times(speed, hours)
    far = done + left
    rest = minus(far, done)
    return Story(
        f"The {goal} {d.one('is', 'lies')} {far} {unit} away. {who} has been on the road for {hours} "
        f"hours at "
        f"{speed} {unit} per hour. How many {unit} are still to go?",
        (f"So far {who} has gone {done.work} {unit}.", f"There are {rest.work} {unit} to go."),
        rest,
    )


def fuel_cost(d: Draw) -> Story:
    who, trips = d.person(), d.number(2, 9)
    litres, price = d.number(5, 40), d.number(2, 4)
    toll = d.number(3, 60)
    fuel = times(litres, price)
    each = plus(fuel, toll)
    total = times(each, trips)
    return Story(
        f"For one trip {who}'s van needs {litres} liters of fuel at ${price} a liter, and the toll is "
        f"${toll}. "
        f"How much do {trips} {d.one('such', 'of these')} trips cost?",
        (f"The fuel for a trip costs {fuel.work} dollars.", f"With the toll a trip costs {each.work} "
        f"dollars.",
         f"All trips cost {total.work} dollars."),
        total,
    )  # fmt: skip


def hours_needed(d: Draw) -> Story:
    who, unit = d.person(), d.one(*_UNITS)
    speed, hours, pause = d.number(3, 9), d.number(4, 30), d.number(2, 8)
    far = speed * hours
    first = d.number(2, far - 2)
    second = far - first
    way = plus(first, second)
    moving = divide(way, speed)
    total = plus(moving, pause)
    return Story(
        f"{who} hikes {first} {unit} to a hut and then {second} {unit} to the next village, at {speed} "
        f"{unit} per "
        f"hour. On the way {who.he} rests for {pause} hours. How many hours does the whole hike take?",
        (f"{who} hikes {way.work} {unit}.", f"That takes {moving.work} hours.",
         f"With the rest it takes {total.work} hours."),
        total,
    )  # fmt: skip


def laps(d: Draw) -> Story:
    who, sport = d.person(), d.one("runs", "swims", "skates", "cycles")
    length, n, days = d.number(50, 400, 50), d.number(3, 9), d.number(2, 6)
    extra = d.number(20, 900, 10)
    day = times(length, n)
    week = times(day, days)
    total = plus(week, extra)
    return Story(
        f"{who} {sport} {n} laps of {length} meters {d.one('on', 'on each of')} {days} days, and {extra} "
        f"meters on "
        f"Sunday. How many meters is that in all?",
        (f"In a day {who.he} does {day.work} meters.", f"In {days} days that is {week.work} meters.",
         f"With Sunday it is {total.work} meters."),
        total,
    )  # fmt: skip


def train_passengers(d: Draw) -> Story:
    what, stops = d.one("train", "tram", "ferry", "bus"), d.one("stop", "station")
    n, out, into = d.number(30, 400), d.number(2, 29), d.number(2, 90)
    off2 = d.number(2, 30)
    after = minus(n, out)
    then = plus(after, into)
    end = minus(then, off2) if then > off2 else minus(then, then - 1)
    off2 = then - end
    return Story(
        f"A {what} carries {n} people. At the first {stops} {out} get off and {into} get on. At the second "
        f"{stops} {off2} get off. How many people are {d.one('still', 'now')} on the {what}?",
        (f"After {out} get off there are {after.work} people.", f"After {into} get on there are "
        f"{then.work} people.",
         f"After the second {stops} there are {end.work} people."),
        end,
    )  # fmt: skip


def minutes_of_practice(d: Draw) -> Story:
    who, what = d.person(), d.one("the piano", "the violin", "chess", "tennis", "the drums", "dancing")
    weekday, weekend, weeks = d.number(10, 60, 5), d.number(20, 95, 5), d.number(2, 8)
    five, two = times(weekday, 5), times(weekend, 2)
    week = plus(five, two)
    total = times(week, weeks)
    return Story(
        f"{who} practices {what} for {weekday} minutes on each of the 5 weekdays and {weekend} minutes on "
        f"each of "
        f"the 2 days of the weekend. How many minutes does {who.he} practice in {weeks} weeks?",
        (f"On weekdays {who.he} practices {five.work} minutes.", f"On weekends {who.he} practices "
        f"{two.work} minutes.",
         f"In a week that is {week.work} minutes.", f"In {weeks} weeks it is {total.work} minutes."),
        total,
    )  # fmt: skip


def fence(d: Draw) -> Story:
    who, what = d.person(), d.one("garden", "field", "yard", "playground", "meadow")
    long, wide, price = d.number(10, 90), d.number(5, 60), d.number(2, 9)
    half = plus(long, wide)
    around = times(half, 2)
    cost = times(around, price)
    return Story(
        f"{who} puts a fence around a rectangular {what} that is {long} meters long and {wide} meters wide. "
        f"A meter of fence costs ${price}. How many dollars does the fence cost?",
        (f"Length and width make {half.work} meters.", f"All the way around it is {around.work} meters.",
         f"The fence costs {cost.work} dollars."),
        cost,
    )  # fmt: skip


def tiles(d: Draw) -> Story:
    who, room = d.person(), d.one("kitchen", "bathroom", "hall", "terrace", "cellar")
    long, wide, per, spare = d.number(4, 20), d.number(3, 12), d.number(2, 9), d.number(3, 60)
    area = times(long, wide)
    needed = times(area, per)
    total = plus(needed, spare)
    return Story(
        f"The floor of {who}'s {room} is {long} meters by {wide} meters, and a square meter takes {per} "
        f"tiles. "
        f"{who.He} also wants {spare} spare tiles. How many tiles does {who.he} "
        f"{d.one('buy', 'order', 'need')}?",
        (f"The floor has {area.work} square meters.", f"It takes {needed.work} tiles.",
         f"With the spare ones {who.he} needs {total.work} tiles."),
        total,
    )  # fmt: skip


def rope(d: Draw) -> Story:
    who, what = d.person(), d.one("rope", "ribbon", "wire", "cable", "string")
    n, each, k, longer = d.number(2, 12), d.number(3, 40), d.number(2, 9), d.number(2, 30)
    other = plus(each, longer)
    short, long = times(n, each), times(k, other)
    used = plus(short, long)
    left = d.number(2, 150)
    whole = used + left
    rest = minus(whole, used)
    return Story(
        f"From {whole} meters of {what} {who} cuts {n} pieces of {each} meters and {k} pieces that are "
        f"{longer} "
        f"meters longer than those. How many meters of {what} are left?",
        (f"A longer piece has {other.work} meters.", f"The short pieces take {short.work} meters.",
         f"The long pieces take {long.work} meters.", f"Together they take {used.work} meters.",
         f"So {rest.work} meters are left."),
        rest,
    )  # fmt: skip


def water_tank(d: Draw) -> Story:
    who, what = d.person(), d.one("tank", "pool", "pond", "barrel")
    pour, leak, minutes = d.number(12, 60), d.number(2, 9), d.number(3, 30)
    start = d.number(10, 500)
    gain = minus(pour, leak)
    added = times(gain, minutes)
    total = plus(start, added)
    return Story(
        f"{who}'s {what} holds {start} liters of water. Each minute {pour} liters flow in and {leak} "
        f"liters leak "
        f"out. How many liters are in the {what} after {minutes} minutes?",
        (f"Each minute the {what} gains {gain.work} liters.",
         f"In {minutes} minutes that is {added.work} liters.", f"Then it holds {total.work} liters."),
        total,
    )  # fmt: skip


def percent_of_the_way(d: Draw) -> Story:
    who, unit = d.person(), d.one(*_UNITS)
    far, rate, more = d.number(40, 900, 20), d.number(10, 60, 5), d.number(2, 20)
    done = percent(rate, far)
    so_far = plus(done, more) if done + more < far else plus(done, 1)
    more = so_far - done
    left = minus(far, so_far)
    return Story(
        f"A {d.one('race', 'trail', 'route')} is {far} {unit} long. On the first day {who} covers {rate}% "
        f"of it, "
        f"and on the second day {more} {unit}. How many {unit} are left?",
        (f"On the first day {who} covers {done.work} {unit}.", f"After two days that is {so_far.work} "
        f"{unit}.",
         f"So {left.work} {unit} are left."),
        left,
    )  # fmt: skip


STORIES = (
    two_speeds, distance_left, fuel_cost, hours_needed, laps, train_passengers, minutes_of_practice,
    fence, tiles,
    rope, water_tank, percent_of_the_way,
)  # fmt: skip
