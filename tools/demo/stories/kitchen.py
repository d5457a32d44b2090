"""Stories about recipes, meals, harvests and measures."""

from __future__ import annotations

from tools.demo.stories.arithmetic import divide, minus, percent, plus, times
from tools.demo.stories.draw import Draw, Story, plural

_POWDERS = ("flour", "sugar", "rice", "oats", "butter", "cocoa")


def recipe(d: Draw) -> Story:
    who, what, stuff = d.person(), d.things("baked"), d.one(*_POWDERS)
    one, batches, has = d.number(50, 400, 10), d.number(2, 9), d.number(20, 300, 10)
    needed = times(one, batches)
    if has >= needed:
        has = needed - 10
    buys = minus(needed, has)
    return Story(
        f"A batch of {what} takes {one} grams of {stuff}. {who} wants to bake {batches} batches and has "
        f"{has} grams "
        f"at home. How many grams of {stuff} must {who.he} {d.one('buy', 'still get')}?",
        (f"{who} needs {needed.work} grams of {stuff}.", f"{who.He} must buy {buys.work} grams."),
        buys,
    )


def scaled_recipe(d: Draw) -> Story:
    who, stuff, dish = d.person(), d.one(*_POWDERS), d.one("soup", "stew", "cake", "pudding", "salad")
    people, per, guests = d.number(2, 9), d.number(11, 60), d.number(3, 30)
    grams = people * per
    one = divide(grams, people)
    total = times(one, guests)
    return Story(
        f"A {dish} for {people} people takes {grams} grams of {stuff}. How many grams does {who} need for "
        f"{guests} people?",
        (f"For one person it takes {one.work} grams.", f"For {guests} people it takes {total.work} grams."),
        total,
    )


def juice(d: Draw) -> Story:
    who, fruit = d.person(), d.things("fruit")
    per, glasses, spoiled = d.number(2, 6), d.number(4, 25), d.number(2, 20)
    used = times(per, glasses)
    bought = used + spoiled + d.number(2, 60)
    good = minus(bought, spoiled)
    left = minus(good, used)
    return Story(
        f"A glass of juice takes {per} {fruit}. {who} buys {bought} {fruit}, but {spoiled} of them are "
        f"spoiled. "
        f"How many {fruit} are left after {who.he} makes {glasses} glasses?",
        (f"There are {good.work} good {fruit}.", f"The juice takes {used.work} {fruit}.",
         f"So {left.work} {fruit} are left."),
        left,
    )  # fmt: skip


def pizza_slices(d: Draw) -> Story:
    what = d.one("pizzas", "cakes", "tarts", "melons")
    n, cut, guests, each = d.number(4, 20), d.number(6, 12), d.number(3, 20), d.number(2, 4)
    slices, eaten = times(n, cut), times(guests, each)
    if eaten >= slices:
        guests = (slices - 1) // each
        eaten = times(guests, each)
    left = minus(slices, eaten)
    return Story(
        f"For a {d.one('party', 'feast', 'meeting')} {n} {what} are cut into {cut} slices each. Each of "
        f"the {guests} "
        f"guests eats {each} slices. How many slices are left?",
        (f"There are {slices.work} slices.", f"The guests eat {eaten.work} slices.", f"So {left.work} "
        f"slices are left."),
        left,
    )  # fmt: skip


def meals_in_a_week(d: Draw) -> Story:
    who, animal = d.person(), d.one("dogs", "cats", "rabbits", "ponies", "parrots")
    n, grams, times_a_day, days = d.number(2, 9), d.number(20, 90, 5), d.number(2, 3), d.number(2, 7)
    one = times(grams, times_a_day)
    day = times(one, n)
    total = times(day, days)
    return Story(
        f"{who} has {n} {animal}. Each gets {grams} grams of food {times_a_day} times a day. How many "
        f"grams of food "
        f"do they {d.one('eat', 'need', 'get')} in {days} days?",
        (f"One animal eats {one.work} grams a day.", f"All {n} eat {day.work} grams a day.",
         f"In {days} days they eat {total.work} grams."),
        total,
    )  # fmt: skip


def harvest(d: Draw) -> Story:
    who, fruit, box = d.person(), d.things("fruit"), d.thing("boxes")
    trees, per, size = d.number(3, 30), d.number(10, 60, 10), d.number(5, 10, 5)
    total = times(trees, per)
    filled = divide(total, size)
    price = d.number(2, 9)
    money = times(filled, price)
    return Story(
        f"{who} has {trees} trees and picks {per} {fruit} from each. {who.He} puts {size} {fruit} into "
        f"each {box} "
        f"and sells the {plural(box)} for ${price} each. How much money does {who.he} get?",
        (f"{who} picks {total.work} {fruit}.", f"They fill {filled.work} {plural(box)}.",
         f"{who} gets {money.work} dollars."),
        money,
    )  # fmt: skip


def drinks_for_guests(d: Draw) -> Story:
    who, drink = d.person(), d.one("lemonade", "juice", "water", "milk", "tea")
    guests, each, bottle = d.number(4, 40), d.number(2, 5), d.number(2, 9)
    needed = times(guests, each)
    spare = -needed % bottle
    both = plus(needed, spare + bottle)
    bottles = divide(both, bottle)
    return Story(
        f"{who} expects {guests} guests, who drink {each} glasses of {drink} each, and wants "
        f"{spare + bottle} more "
        f"glasses to be safe. A bottle fills {bottle} glasses. How many bottles does {who.he} need?",
        (f"The guests drink {needed.work} glasses.", f"To be safe there should be {both.work} glasses.",
         f"That takes {bottles.work} bottles."),
        bottles,
    )  # fmt: skip


def lunch_orders(d: Draw) -> Story:
    who = d.person()
    soup, bread, n, m = d.number(4, 15), d.number(2, 9), d.number(3, 20), d.number(3, 30)
    soups, breads = times(n, soup), times(m, bread)
    total = plus(soups, breads)
    bonus = d.number(2, 60)
    result = plus(total, bonus)
    return Story(
        f"In {who}'s cafe a soup costs ${soup} and a sandwich ${bread}. At noon {n} soups and {m} "
        f"sandwiches are "
        f"sold, and the guests leave ${bonus} in tips. How much money comes in?",
        (f"The soups bring {soups.work} dollars.", f"The sandwiches bring {breads.work} dollars.",
         f"Together that is {total.work} dollars.", f"With the tips it is {result.work} dollars."),
        result,
    )  # fmt: skip


def candy_bags(d: Draw) -> Story:
    who, sweet = d.person(), d.one("candies", "chocolates", "caramels", "gumdrops", "mints")
    bags, red, green, eaten = d.number(3, 15), d.number(2, 20), d.number(2, 20), d.number(2, 15)
    each = plus(red, green)
    total = times(bags, each)
    if eaten >= total:
        eaten = total - 1
    left = minus(total, eaten)
    return Story(
        f"{who} fills {bags} bags with {red} red and {green} green {sweet} each. Then {eaten} {sweet} are "
        f"eaten. "
        f"How many {sweet} are left in the bags?",
        (f"A bag holds {each.work} {sweet}.", f"All bags hold {total.work} {sweet}.",
         f"After that {left.work} {sweet} are left."),
        left,
    )  # fmt: skip


def sugar_share(d: Draw) -> Story:
    who, drink = d.person(), d.one("syrup", "jam", "sauce", "punch")
    whole, sugar, water = d.number(40, 800, 20), d.number(5, 45, 5), d.number(5, 45, 5)
    a, b = percent(sugar, whole), percent(water, whole)
    both = plus(a, b)
    rest = minus(whole, both)
    return Story(
        f"{who} makes {whole} grams of {drink}: {sugar}% of it is sugar, {water}% is water, and the rest "
        f"is fruit. "
        f"How many grams of fruit are in it?",
        (f"There are {a.work} grams of sugar.", f"There are {b.work} grams of water.",
         f"Together that is {both.work} grams.", f"So there are {rest.work} grams of fruit."),
        rest,
    )  # fmt: skip


def milk_cans(d: Draw) -> Story:
    who, animal = d.person(), d.one("cows", "goats")
    n, litres, used, can = d.number(4, 30), d.number(4, 20), d.number(2, 15), d.number(4, 9)
    made = times(n, litres)
    used = made % can + can * (used % 3)
    if used == 0:
        used = can
    rest = minus(made, used)
    cans = divide(rest, can)
    return Story(
        f"{who} has {n} {animal} that give {litres} liters of milk each. {who.His} family uses {used} "
        f"liters, and "
        f"the rest is filled into cans of {can} liters. How many cans are {d.one('filled', 'needed')}?",
        (
            f"The {animal} give {made.work} liters.",
            f"That leaves {rest.work} liters.",
            f"They fill {cans.work} cans.",
        ),
        cans,
    )


def garden_rows(d: Draw) -> Story:
    who = d.person()
    a, b = d.one("carrots", "onions", "beets", "leeks"), d.one("cabbages", "tomatoes", "beans", "peppers")
    n, per, m, dead = d.number(3, 20), d.number(5, 40), d.number(2, 9), d.number(3, 14)
    first = times(n, per)
    second = times(first, m)
    total = plus(first, second)
    left = minus(total, dead)
    return Story(
        f"{who} plants {n} rows of {a} with {per} in each row, and {m} times as many {b}. The frost kills "
        f"{dead} "
        f"plants. How many plants are left?",
        (f"There are {first.work} {a}.", f"There are {second.work} {b}.", f"Together that is {total.work} "
        f"plants.",
         f"After the frost {left.work} plants are left."),
        left,
    )  # fmt: skip


STORIES = (
    recipe, scaled_recipe, juice, pizza_slices, meals_in_a_week, harvest, drinks_for_guests, lunch_orders,
    candy_bags, sugar_share, milk_cans, garden_rows,
)  # fmt: skip
