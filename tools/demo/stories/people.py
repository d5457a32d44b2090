"""Stories about ages, schools, games, reading and work."""

from __future__ import annotations

from tools.demo.stories.arithmetic import divide, minus, percent, plus, times
from tools.demo.stories.draw import Draw, Story


def ages(d: Draw) -> Story:
    x, y = d.person(), d.person()
    old, word, years = d.number(4, 30), d.one(("twice", 2), ("three times", 3)), d.number(2, 25)
    other = times(old, word[1])
    both = plus(old, other)
    later = times(years, 2)
    total = plus(both, later)
    return Story(
        f"{x} is {old} years old and {y} is {word[0]} as old. How old will they be together in {years} "
        f"years?",
        (f"{y} is {other.work} years old.", f"Together they are {both.work} years old.",
         f"In {years} years both are older by {later.work} years together.",
         f"Then they are {total.work} years old together."),
        total,
    )  # fmt: skip


def parent_age(d: Draw) -> Story:
    child, parent = d.person(), d.one("mother", "father", "uncle", "aunt")
    age, factor, ago = d.number(6, 14), d.number(3, 5), d.number(2, 5)
    now = times(age, factor)
    then = minus(now, ago)
    was = minus(age, ago)
    gap = plus(then, was)
    return Story(
        f"{child} is {age}, and {child.his} {parent} is {factor} times as old. What was the sum of their "
        f"ages "
        f"{ago} years ago?",
        (f"The {parent} is {now.work} years old.", f"{ago} years ago the {parent} was {then.work}.",
         f"{child} was {was.work}.", f"The sum was {gap.work} years."),
        gap,
    )  # fmt: skip


def pages_left(d: Draw) -> Story:
    who = d.person()
    morning, evening, days, left = d.number(5, 40), d.number(5, 40), d.number(2, 9), d.number(3, 200)
    day = plus(morning, evening)
    read = times(day, days)
    book = read + left
    rest = minus(book, read)
    return Story(
        f"{who} reads {morning} pages every morning and {evening} pages every evening. {who.His} book has "
        f"{book} "
        f"pages. How many pages are left after {days} days?",
        (f"In a day {who.he} reads {day.work} pages.", f"In {days} days {who.he} reads {read.work} pages.",
         f"So {rest.work} pages are left."),
        rest,
    )  # fmt: skip


def days_to_finish(d: Draw) -> Story:
    who, what = d.person(), d.one("pages", "exercises", "puzzles", "lessons")
    rate, days, done = d.number(3, 12), d.number(3, 30), d.number(2, 90)
    total = rate * days + done
    rest = minus(total, done)
    needed = divide(rest, rate)
    return Story(
        f"A book has {total} {what}. {who} has already done {done} and does {rate} a day from now on. In "
        f"how many "
        f"days will {who.he} {d.one('be done', 'finish', 'be finished')}?",
        (f"There are {rest.work} {what} left.", f"That takes {needed.work} days."),
        needed,
    )


def classes(d: Draw) -> Story:
    what = d.one("school", "camp", "college")
    n, each, teachers, buses = d.number(3, 20), d.number(15, 32), d.number(2, 9), d.number(2, 9)
    pupils = times(n, each)
    adults = times(n, teachers)
    people = plus(pupils, adults)
    seats = people + buses
    free = minus(seats, people)
    return Story(
        f"A {what} has {n} {d.one('classes', 'groups')} with {each} children and {teachers} adults each. "
        f"The buses "
        f"for a trip have {seats} seats. How many seats stay free?",
        (f"There are {pupils.work} children.", f"There are {adults.work} adults.", f"Together "
        f"{people.work} people go.",
         f"So {free.work} seats stay free."),
        free,
    )  # fmt: skip


def girls_and_boys(d: Draw) -> Story:
    what, n, rate = d.one("school", "club", "choir", "camp"), d.number(40, 900, 20), d.number(25, 75, 5)
    girls = percent(rate, n)
    boys = minus(n, girls)
    more = d.number(2, 40)
    now = plus(boys, more)
    return Story(
        f"A {what} has {n} {d.one('members', 'children', 'students')}, and {rate}% of them are girls. "
        f"Then {more} more "
        f"boys join. How many boys are there now?",
        (
            f"There are {girls.work} girls.",
            f"At first there are {boys.work} boys.",
            f"Now there are {now.work} boys.",
        ),
        now,
    )


def game_points(d: Draw) -> Story:
    x, y, game = d.person(), d.person(), d.one("darts", "cards", "bowling", "chess", "basketball")
    r, each, other, lost = d.number(3, 12), d.number(5, 40), d.number(5, 40), d.number(2, 30)
    first = times(r, each)
    second = times(r, other)
    if first == second:
        second = times(r, other + 1)
        other += 1
    after = plus(first, lost)
    total = plus(after, second)
    return Story(
        f"In {r} rounds of {game} {x} scores {each} points a round and {y} scores {other} points a round. "
        f"{x} also "
        f"gets {lost} bonus points. How many points do they have together?",
        (f"{x} scores {first.work} points.", f"With the bonus {x} has {after.work} points.",
         f"{y} scores {second.work} points.", f"Together they have {total.work} points."),
        total,
    )  # fmt: skip


def football_table(d: Draw) -> Story:
    team = d.one("Lions", "Tigers", "Bears", "Eagles", "Sharks", "Wolves")
    win, draws, fine = d.number(3, 30), d.number(2, 20), d.number(2, 8)
    points = times(win, 3)
    both = plus(points, draws)
    total = minus(both, fine)
    return Story(
        f"A win is worth 3 points and a draw 1 point. The {team} win {win} games and draw {draws}, and "
        f"lose {fine} "
        f"points as a {d.one('penalty', 'punishment')}. How many points do they have?",
        (f"The wins bring {points.work} points.", f"With the draws it is {both.work} points.",
         f"After the penalty they have {total.work} points."),
        total,
    )  # fmt: skip


def average(d: Draw) -> Story:
    who, what = d.person(), d.one("tests", "games", "rounds", "jumps")
    mean, a, b = d.number(12, 90), d.number(2, 9), d.number(2, 9)
    first, second, third = mean - a, mean + b, mean + a - b
    total = plus(first, second, third)
    result = divide(total, 3)
    return Story(
        f"In three {what} {who} gets {first}, {second} and {third} points. What is {who.his} average?",
        (f"In total {who.he} gets {total.work} points.", f"The average is {result.work} points."),
        result,
    )


def team_work(d: Draw) -> Story:
    x, y = d.person(), d.person()
    what = d.one("letters", "shirts", "bricks", "windows", "parcels", "plants")
    a, b, hours, more = d.number(3, 40), d.number(3, 40), d.number(2, 9), d.number(2, 60)
    rate = plus(a, b)
    made = times(rate, hours)
    total = plus(made, more)
    return Story(
        f"{x} handles {a} {what} an hour and {y} handles {b} an hour. They work side by side for {hours} "
        f"hours, and "
        f"then {x} handles {more} more {what} alone. How many {what} are handled in all?",
        (f"Together they handle {rate.work} {what} an hour.", f"In {hours} hours that is {made.work} {what}.",
         f"In all {total.work} {what} are handled."),
        total,
    )  # fmt: skip


def factory(d: Draw) -> Story:
    what = d.one("lamps", "chairs", "clocks", "toys", "bottles")
    machines, rate, hours, bad = d.number(3, 12), d.number(4, 30), d.number(2, 9), d.number(2, 11)
    hourly = times(machines, rate)
    made = times(hourly, hours)
    good = minus(made, bad)
    return Story(
        f"A factory has {machines} machines, and each makes {rate} {what} an hour. In {hours} hours {bad} "
        f"of the "
        f"{what} {d.one('turn out bad', 'are broken', 'fail the test')}. How many are good?",
        (f"The machines make {hourly.work} {what} an hour.", f"In {hours} hours they make {made.work} "
        f"{what}.",
         f"So {good.work} are good."),
        good,
    )  # fmt: skip


def brothers_allowance(d: Draw) -> Story:
    x, y, who = d.person(), d.person(), d.one("grandmother", "grandfather", "aunt", "uncle")
    each, weeks, spent_x, spent_y = d.number(4, 30), d.number(5, 20), d.number(2, 9), d.number(2, 9)
    got = times(each, weeks)
    a, b = minus(got, spent_x), minus(got, spent_y)
    total = plus(a, b)
    return Story(
        f"A {who} gives {x} and {y} ${each} each {d.one('every', 'per')} week for {weeks} weeks. {x} "
        f"spends ${spent_x} "
        f"and {y} spends ${spent_y} of it. How many dollars do they have left together?",
        (f"Each gets {got.work} dollars.", f"{x} has {a.work} dollars left.", f"{y} has {b.work} dollars "
        f"left.",
         f"Together they have {total.work} dollars."),
        total,
    )  # fmt: skip


STORIES = (
    ages, parent_age, pages_left, days_to_finish, classes, girls_and_boys, game_points, football_table,
    average,
    team_work, factory, brothers_allowance,
)  # fmt: skip
