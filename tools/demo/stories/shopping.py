"""Stories about prices, purchases, wages and savings. All amounts are whole dollars."""

from __future__ import annotations

from tools.demo.stories.arithmetic import divide, minus, percent, plus, times
from tools.demo.stories.draw import Draw, Story, plural


def two_kinds(d: Draw) -> Story:
    who, a, b = d.person(), d.things("goods"), d.things("goods")
    n, m, p, q = d.number(2, 12), d.number(2, 12), d.number(2, 40), d.number(2, 40)
    first, second = times(n, p), times(m, q)
    total = plus(first, second)
    return Story(
        f"{who} {d.one('buys', 'purchases', 'orders')} {n} {a} for ${p} each and {m} {b} for ${q} each. "
        f"How {d.one(f'much does {who.he} pay', f'many dollars does {who.he} spend')} in total?",
        (f"The {a} cost {first.work} dollars.", f"The {b} cost {second.work} dollars.",
         f"Together that is {total.work} dollars."),
        total,
    )  # fmt: skip


def change_from_bill(d: Draw) -> Story:
    who, a = d.person(), d.things("fruit")
    n, p = d.number(2, 15), d.number(2, 9)
    cost = times(n, p)
    bill = (cost // 50 + d.number(1, 4)) * 50
    change = minus(bill, cost)
    return Story(
        f"At {d.shop()}, {a} cost ${p} a {d.one('kilo', 'bag')}. {who} takes {n} of them and pays with "
        f"${bill}. "
        f"How much change does {who.he} get?",
        (f"The {a} cost {cost.work} dollars.", f"{who.He} gets back {change.work} dollars."),
        change,
    )


def saving_for(d: Draw) -> Story:
    who, a = d.person(), d.one("bike", "guitar", "phone", "camera", "tent", "desk")
    weekly, weeks = d.number(5, 60), d.number(3, 20)
    has, short = d.number(10, 200, 5), d.number(5, 90)
    saved = times(weekly, weeks)
    total = plus(has, saved)
    price = total + short
    left = minus(price, total)
    return Story(
        f"{who} wants a {a} that costs ${price}. {who.He} already has ${has} and saves ${weekly} "
        f"{d.one('every', 'each', 'a')} week for {weeks} weeks. How much more does {who.he} need?",
        (f"In {weeks} weeks {who.he} saves {saved.work} dollars.", f"Then {who.he} has {total.work} dollars.",
         f"{who.He} still needs {left.work} dollars."),
        left,
    )  # fmt: skip


def discount(d: Draw) -> Story:
    who, a = d.person(), d.one("jacket", "chair", "watch", "radio", "coat", "carpet")
    price, rate = d.number(20, 400, 20), d.number(5, 75, 5)
    off = percent(rate, price)
    pays = minus(price, off)
    return Story(
        f"A {a} costs ${price}, but {d.one('today', 'this week', 'in the sale')} it is {rate}% off. "
        f"How much does {who} pay for it?",
        (f"The discount is {off.work} dollars.", f"{who} pays {pays.work} dollars."),
        pays,
    )


def discount_on_many(d: Draw) -> Story:
    who, a = d.person(), d.thing("goods")
    n, price, rate = d.number(2, 9), d.number(20, 100, 20), d.number(5, 50, 5)
    off = percent(rate, price)
    each = minus(price, off)
    total = times(n, each)
    return Story(
        f"A {a} normally costs ${price}. {who} gets a discount of {rate}% on every one and buys {n} of them. "
        f"How many dollars does {who.he} pay altogether?",
        (f"The discount on one is {off.work} dollars.", f"So one costs {each.work} dollars.",
         f"For {n} of them {who.he} pays {total.work} dollars."),
        total,
    )  # fmt: skip


def wages(d: Draw) -> Story:
    who, job = d.person(), d.one("waiter", "driver", "painter", "teacher", "cook", "clerk")
    rate, hours, days, tips = d.number(8, 40), d.number(3, 10), d.number(2, 7), d.number(10, 150, 5)
    per_day = times(rate, hours)
    pay = times(per_day, days)
    total = plus(pay, tips)
    return Story(
        f"{who} works as a {job} and earns ${rate} {d.one('an hour', 'per hour')}. {who.He} works {hours} "
        f"hours a day for "
        f"{days} days and also gets a bonus of ${tips}. How much does {who.he} earn?",
        (f"In a day {who.he} earns {per_day.work} dollars.", f"In {days} days that is {pay.work} dollars.",
         f"With the bonus {who.he} earns {total.work} dollars."),
        total,
    )  # fmt: skip


def overtime(d: Draw) -> Story:
    who = d.person()
    rate, hours, extra_rate, extra = d.number(8, 30), d.number(20, 40), d.number(31, 50), d.number(2, 9)
    normal, over = times(rate, hours), times(extra, extra_rate)
    total = plus(normal, over)
    return Story(
        f"{who} earns ${rate} an hour for normal work and ${extra_rate} an hour for overtime. "
        f"Last week {who.he} worked {hours} normal hours and {extra} hours of overtime. How much did "
        f"{who.he} earn?",
        (f"For normal hours {who.he} earned {normal.work} dollars.",
         f"For overtime {who.he} earned {over.work} dollars.", f"In all {who.he} earned {total.work} "
         f"dollars."),
        total,
    )  # fmt: skip


def profit(d: Draw) -> Story:
    who, a = d.person(), d.things("baked")
    n, cost, price = d.number(12, 90), d.number(2, 5), d.number(6, 12)
    spent, got = times(n, cost), times(n, price)
    gain = minus(got, spent)
    return Story(
        f"{who} makes {n} {a} that cost ${cost} each to make and sells {d.one('all of them', 'them all')} "
        f"for ${price} each. "
        f"What is {who.his} profit in dollars?",
        (f"Making the {a} costs {spent.work} dollars.", f"Selling them brings {got.work} dollars.",
         f"The profit is {gain.work} dollars."),
        gain,
    )  # fmt: skip


def share_the_bill(d: Draw) -> Story:
    who, friends = d.person(), d.number(2, 8)
    people = plus(friends, 1)
    each = d.number(8, 60)
    bill = times(people, each)
    tip = people * d.number(1, 5)
    meal = bill - tip
    total = plus(meal, tip)
    share = divide(total, people)
    return Story(
        f"{who} and {friends} friends eat {d.one('dinner', 'lunch', 'breakfast')} together. The food "
        f"costs ${meal} and they leave a tip of ${tip}. "
        f"They split everything equally. How much does each person pay?",
        (f"There are {people.work} people.", f"In total they pay {total.work} dollars.",
         f"Each person pays {share.work} dollars."),
        share,
    )  # fmt: skip


def tickets(d: Draw) -> Story:
    adults, children = d.number(2, 30), d.number(2, 40)
    price, less = d.number(8, 25), d.number(2, 7)
    reduced = minus(price, less)
    a, c = times(adults, price), times(children, reduced)
    total = plus(a, c)
    where = d.one("zoo", "museum", "circus", "cinema", "theater", "castle")
    return Story(
        f"A ticket to the {where} costs ${price} for adults, and children pay ${less} less. "
        f"A group of {adults} adults and {children} children {d.one('visits', 'goes to')} the {where}. "
        f"How much do the tickets cost?",
        (f"A child pays {reduced.work} dollars.", f"The adults pay {a.work} dollars.",
         f"The children pay {c.work} dollars.", f"Together they pay {total.work} dollars."),
        total,
    )  # fmt: skip


def twice_the_price(d: Draw) -> Story:
    who, a, b = d.person(), d.thing("goods"), d.thing("goods")
    word, factor = d.one(("twice", 2), ("three times", 3), ("four times", 4))
    price, n = d.number(3, 60), d.number(2, 9)
    other = times(price, factor)
    several = times(n, price)
    total = plus(other, several)
    return Story(
        f"A {a} costs ${price} and a {b} costs {word} as much. {who} buys one {b} and {n} {plural(a)}. "
        f"How many dollars does {who.he} pay?",
        (f"The {b} costs {other.work} dollars.", f"The {plural(a)} cost {several.work} dollars.",
         f"{who.He} pays {total.work} dollars."),
        total,
    )  # fmt: skip


def money_left(d: Draw) -> Story:
    who, a, b = d.person(), d.thing("goods"), d.thing("goods")
    p, q, left = d.number(5, 300), d.number(5, 300), d.number(2, 400)
    has = p + q + left
    after = minus(has, p)
    rest = minus(after, q)
    return Story(
        f"{who} has ${has}. {who.He} spends ${p} on a {a} and ${q} on a {b}. "
        f"How much money {d.one(f'does {who.he} have left', 'is left', 'remains')}?",
        (
            f"After the {a} {who.he} has {after.work} dollars.",
            f"After the {b} {who.he} has {rest.work} dollars.",
        ),
        rest,
    )


def subscription(d: Draw) -> Story:
    who, what = d.person(), d.one("gym", "music service", "swimming club", "library", "chess club")
    monthly, joining, years = d.number(5, 60), d.number(10, 90, 5), d.number(1, 4)
    months = times(years, 12)
    fees = times(monthly, months)
    total = plus(fees, joining)
    span = "1 year" if years == 1 else f"{years} years"
    return Story(
        f"A {what} costs ${monthly} a month plus a single joining fee of ${joining}. "
        f"How much does {who} pay {d.one('over', 'in')} {span}?",
        (f"That is {months.work} months.", f"The monthly fees come to {fees.work} dollars.",
         f"With the joining fee {who.he} pays {total.work} dollars."),
        total,
    )  # fmt: skip


def bulk_or_single(d: Draw) -> Story:
    who, a = d.person(), d.things("fruit")
    single, pack = d.number(3, 9), d.number(4, 12)
    cheaper = pack * single - d.number(2, 2 * pack)
    packs = d.number(2, 9)
    apart = times(pack, single)
    off = minus(apart, cheaper)
    total = times(packs, off)
    return Story(
        f"A single packet of {a} costs ${single}, and a carton of {pack} packets costs ${cheaper}. "
        f"How many dollars does {who} save by buying {packs} cartons instead of the same packets one by one?",
        (f"The packets of one carton cost {apart.work} dollars apart.", f"A carton saves {off.work} dollars.",
         f"With {packs} cartons {who.he} saves {total.work} dollars."),
        total,
    )  # fmt: skip


def raise_in_pay(d: Draw) -> Story:
    who = d.person()
    pay, rate, months = d.number(1000, 3000, 100), d.number(2, 20, 2), d.number(2, 3)
    more = percent(rate, pay)
    new = plus(pay, more)
    total = times(months, new)
    return Story(
        f"{who} earns ${pay} a month and gets a raise of {rate}%. How much does {who.he} earn in {months} "
        f"months after that?",
        (f"The raise is {more.work} dollars.", f"{who.He} now earns {new.work} dollars a month.",
         f"In {months} months that is {total.work} dollars."),
        total,
    )  # fmt: skip


def collecting_for_class(d: Draw) -> Story:
    who = d.person()
    pupils, each, costs, spare = d.number(12, 35), d.number(3, 20), d.number(2, 4), d.number(1, 9)
    collected = times(pupils, each)
    left = minus(collected, costs * 10 + spare)
    share = costs * 10 + spare
    return Story(
        f"{who} collects ${each} from each of the {pupils} pupils in {who.his} class. The bus costs "
        f"${share}. "
        f"How much money is left for food?",
        (f"The pupils give {collected.work} dollars.", f"After the bus {left.work} dollars are left."),
        left,
    )


STORIES = (
    two_kinds, change_from_bill, saving_for, discount, discount_on_many, wages, overtime, profit,
    share_the_bill,
    tickets, twice_the_price, money_left, subscription, bulk_or_single, raise_in_pay, collecting_for_class,
)  # fmt: skip
