"""Word problems from a grammar: frames of what happens, in which every phrase has alternatives.

A frame is written as lines. The first holds ranges of numbers (`n 20-300, k 2-9`, the others by default) and numbers
that follow from them (`w = k * m`). Then come facts, one a line, in their order but for those behind `~`; the question
behind `?`; and the working, one calculation a line behind `=` with its unit behind `:`. Results of calculations are
called x, y and z. `[a/b]` chooses, also nothing. {P}, {Q}, {R}: people, with {s} for he or she, {o} for him or her and
{h} for his or her of {P}; {A}, {B}, {C}: things in the plural; {b}, {bs}: a container and several; {G}: a place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo import words
from tools.demo.stories.arithmetic import Worked, divide, minus, plus, times
from tools.demo.stories.draw import Story
from tools.demo.wording import Wording, cap, plural_of

_TEXT = """\
n 20-400
{P} [has/had/owns/starts with/keeps/begins with/counts/has saved/is given] {n} {A}|In {h} {b}, {P} [has/keeps/had] {n} {A}|There are {n} {A} in {P}'s {b}
[/Then /Later /On Friday ]{s} [gives/sells/loses/donates/mails/passes/drops/burns/hides/feeds/uses up/eats/throws out/pays/trades in/ships off/wastes/spills] {m} [/of them/{A}]|{m} [/{A}/of them] are [stolen/lost/sold/taken/used/spoiled/eaten/removed/broken/thrown out/mailed/set aside/ruined/picked by {Q}]|{Q} [takes/grabs/steals/borrows/carries off/eats/buys/destroys] {m} [/of them/{A}]
[/Then /Later /After lunch /Next ]{s} [gets/finds/buys/receives/collects/makes/picks up/is given/earns/gathers/builds/orders/discovers/unpacks/wins/inherits] {r} [more/new ones/others/extra {A}/more {A}]|{r} [more/new ones/others] [come/arrive/are added/are brought/turn up/are found/are put in]|{Q} [brings/sends/hands/offers/lends/mails/gives] {o} {r} [more/{A}/new ones/others]
? How many {A} [does {P} have/are left/does {s} have now/remain/are there/does {P} end up with/does {P} own now/are still there/are there in the end]|How many [/of them ]does {P} have [now/in the end/at last/finally]|What [is the number of {A} now/number of {A} does that make/number of {A} remains]
= n - m : {A}
= x + r : {A}

n 20-400
[A/The] {G} [has/holds/owns/offers/keeps/stores/counts] {n} {A}|{n} {A} [are/stand/lie/wait/live/were/stay] in [a/the] {G}|In [a/the] {G} there are {n} {A}
[/By noon /On Monday /Before lunch /Early in the day ]{m} [/of them/{A}/of the {A}] [are sold/are taken away/leave/break/are sent back/get lost/are given away/die/are moved out/go bad/are stolen/disappear/are rented/are picked up/go home/are shipped/run away/are used/are loaned out/are eaten/are carried off]
[/Then /Later /By evening /On Tuesday /Late in the day ]{r} [/more/new ones/others/new {A}/other {A}] [come/arrive/are added/are delivered/are brought/appear/are put in/are made/are returned/come back/enter/are born/join/are found/are bought/move in/are sent back in]
? How many {A} [are/stay/are left/remain/are there] in the {G} [now/then/after that/in the end/at night/at last]|How many {A} [does the {G} have/are there/are left/remain/does that leave] [now/then/after all this/at the end]
= n - m : {A}
= x + r : {A}

n 60-400, m 2-30, r 2-30
[A/The] {G} [has/holds/keeps/counts] {n} {A}|{n} {A} [are/stand/lie/wait/live] in [a/the] {G}|There [are/were] {n} {A} in [a/the] {G}
{m} [/of them/of these/of the {A}/{A}] [are broken/get lost/are sold/are taken home/become ill/leave/fall down/are given away/are stolen/are too old/are sent out/wither/go to another {G}/die], and {r} [/more/others/{A}] [are taken out/are thrown away/leave too/are used up/go away as well/are bought/are picked by {P}/are missing/are sold/run off/are given to {P}]
? How many {A} [are left/remain/stay/are in the {G} then/are still in the {G}/does the {G} have now/are there now]
= n - m : {A}
= x - r : {A}

k 2-15, m 2-20
{P} [has/owns/raises/looks after/feeds/employs/watches] {k} {A}. [Each of them/Each/Every one of them/Each one] [makes/gives/produces/brings/yields/finds/sells] {m} {B} [a day/every day/each week/per month/a year]|{k} {A} each [make/give/produce/bring/yield/drop] {m} {B} [a day/every day/each week/a month]
~ [Of these/From that/Out of them], {P} [keeps/eats/uses/needs/gives away/loses/throws out] {r}|{P} [keeps/eats/uses/needs/gives away/loses/saves] {r} [/of the {B}/of them/{B}] and [sells/packs/mails/stores] the [others/rest/remaining ones]
? How many {B} [are left/remain/does {P} sell/can {P} sell/are left to sell/go to others/does that leave]
= k * m : {B}
= x - r : {B}

k 2-15, m 2-25, r 2-30
{P} [plants/sets out/lines up/arranges/places/draws/lays/sows/puts down] {k} [rows/lines/columns/beds/layers/stacks] of {m} {A}[/ each]|{P} [sets/plants/places/puts/lays] {m} {A} in each of {k} [rows/lines/beds/stacks/layers]|There are {k} [rows/lines/columns/beds] with {m} {A} in each
[/Then /Later /Sadly, /In a storm, /During the night /But ]{r} [/of them/{A}/of the {A}] [fall over/break/dry out/are eaten/are stolen/get lost/do not grow/are taken away/are ruined/rot/freeze/are empty/are closed/are damaged/are not used]
? How many {A} [are left/remain/are still there/are fine/stay/live/are good/are not lost/are in place]
= k * m : {A}
= x - r : {A}

p 2-20, q 2-20, k 2-12, r 2-12
[A ticket/A ride/A seat/Entry/Dinner/The bus/The show/A pass/A lesson/Lunch] costs [an adult/a grown-up/a man/a guest/a visitor] ${p} and [a child/a student/a senior/a member/a kid] ${q}|[Adults/Grown-ups/Guests/Teachers/Visitors] pay ${p} [each/for a ride/to enter/for a seat], [children/students/kids/seniors/members] [pay /]${q}|The price is ${p} for [grown-ups/guests/teachers/a man] and ${q} for [kids/students/members/pupils]
{k} [adults/grown-ups/guests/teachers/visitors] and {r} [children/students/kids/seniors/members] [go in/come/ride/take part/eat/enter/buy one each/join]|A family of {k} [adults/grown-ups] and {r} [kids/children] [goes/comes/visits]
? How much [do they pay/is that/do they spend/does it cost/do all of them pay/money do they need] [altogether/in total/in all/]|What [is the total/do they pay together/is the price for all of them]
= k * p : dollars
= r * q : dollars
= x + y : dollars

p 2-40, q 2-40, k 2-12, r 2-12
[{A}/The {A}] cost ${p} [each/apiece/a piece/per unit] and {B} [cost /]${q} [each/apiece/per unit]|[One/Each] of the {A} costs ${p}, [one/each] of the {B} ${q}|A {G} sells {A} at ${p} each and {B} at ${q} each
{P} [buys/gets/wants/takes/orders/needs/picks up/puts in {h} bag] {k} {A} and {r} {B}|{P} [buys/takes/orders] {k} of the {A} and {r} of the {B}
? How much [does {s} pay/does {P} spend/is it/does it cost/money does {s} need/must {P} pay] [altogether/in total/in all/]|What [does {P} pay/is the total/is the price of everything/does everything cost]
= k * p : dollars
= r * q : dollars
= x + y : dollars

k 2-12, m 2-25, r 1-40, n = k * m + r
[A/The] {b} [holds/has/is filled with/was full with/stores] {n} {A}|{P} [has/finds/brings/owns/opens] [a {b} with/] {n} {A}|There are {n} {A} in [a/the] {b}
{P} [hands/gives/deals/passes/serves/sends] {m} {A} to [each/every one] of {k} [friends/guests/students/people/players/workers/pupils]|{k} [friends/guests/people/players/workers/pupils] [each take/each get/take/receive/are given] {m} [each/{A} each]|{P} [fills/packs] {k} {bs} with {m} {A} each
? How many {A} [are left/remain/stay/are still there/are not given out/does {P} keep/are left over/stay behind]
= k * m : {A}
= n - x : {A}

k 2-12, m 4-60, r 4-90, n = k * m + r
{P} [wants to/has to/must/plans to/needs to/is going to/would like to] [read/write/copy/learn/walk/drive/knit/paint/build/clean/count/type/swim/run/plant] {n} [pages/miles/lines/words/meters/kilometers/{A}]|{P}'s [task/goal/job/plan/aim] is {n} [pages/miles/lines/words/meters/{A}]
[For/In/During/Over] [the first /the last /]{k} [days/hours/weeks/evenings/mornings], {s} [does/did/managed/finished/has done/completed/gets through] {m} [each/every day/a day/each time/per day/of them each]|{s} [does/did/has done/finished/completed] {m} [a day/each day/every evening/an hour/per week] for {k} [days/evenings/hours/weeks]
? How many [are left/remain/are still to do/does {P} still need/more must {s} do/are missing/are not done yet]|How [far/much] does {P} [still have/have] to go
= k * m : done
= n - x : left

n 20-300
[At first/In the morning/At eight/Early on] {n} [people/cars/{A}/birds/guests/students/boats/bikes] [are/stand/wait/sit] in [a/the] {G}|{n} [people/cars/{A}/birds/guests/boats/bikes] [stand/wait/sit/stop/rest] at [a/the] {G}
[/Soon /Then /At noon /After a while ]{m} [leave/go/drive off/move on/run off/go home/disappear/fly off/are gone] [and/, then/, but] [/later /soon /at night /another ]{r} [come/arrive/show up/drive in/join/turn up/enter/come back/pull in]
? How many [are there now/are there/are in the {G}/remain/stay/is that/wait there/are there at the end]
= n - m : left
= x + r : there

k 2-12, m 4-30, r 2-30
[A/The] {G} has {k} {bs}[/ of {A}] [with/, and in each are/, each with/ and in every one are] {m} {A}|{k} {bs} [with/of] {m} {A} [each/in each] [stand/are/lie/are stored] in [a/the] {G}|{P} [has/owns] {k} {bs}, [each of them has/in each there are/and each one holds] {m} {A}
{r} [/of the {A}/of them/{A}] [are broken/are damaged/do not work/are dirty/cannot be sold/are too small/are missing/have holes/are bad/are torn/are worn out/are lent out]
? How many {A} [are fine/are good/work/can be sold/are in order/are left/are not bad/are there to use]
= k * m : {A}
= x - r : {A}

n 5-90, m 2-15, k 2-12, r 2-30
[{P}/{P}'s bank/{P}'s box/{P}'s account] [has/holds/starts with/began with/contains] ${n}|[There is/There are] [${n}/{n} dollars] in {P}'s [bank/box/account/wallet/savings]
[Every/Each] [week/day/month/Sunday/time] {P} [saves/adds/earns/gets/receives/puts away/pays in/is given] ${m} [/more], for {k} [weeks/days/months/Sundays/times]|For {k} [weeks/days/months] {s} [saves/adds/earns/gets/receives/pays in] ${m} [each week/a day/every month/each time]|{s} [saves/adds/earns/gets/receives] ${m} a [week/day/month]. That goes on for {k} [weeks/days/months]
Then {s} [spends/pays/loses/gives away/needs/removes/uses/withdraws] ${r} [for a book/for a gift/on shoes/for lunch/for {A}/]|[After that/Afterwards/At the end] ${r} [is spent/is used/goes to {Q}/is paid/is lost]
? How much [money does {P} have/is left/does {s} have/is there/money is left/does {P} have then/money remains] [now/in the end/]
= m * k : dollars
= n + x : dollars
= y - r : dollars

n 5-90, m 2-15, k 2-12
[{P}/{P}'s bank/{P}'s box/{P}'s account] [has/holds/starts with/contains] ${n}|[There is/There are] [${n}/{n} dollars] in {P}'s [bank/box/account/wallet/savings]
[Every/Each] [week/day/month/Sunday] {s} [saves/adds/earns/gets/receives/puts away/pays in/drops in] ${m} [/more]
? How much [money does {P} have/does {s} have/is there/is it/money is in it] after {k} [weeks/days/months/Sundays]|What [is in it/does {P} own/is the total] after {k} [weeks/days/months/Sundays]
= m * k : dollars
= n + x : dollars

k 2-10, m 2-12, p 2-40
[There are/In a game there are/A class has/A club has/In a factory there are] {k} [teams/groups/workers/people/players/machines/members]. [Each/Every one/Each of them] [makes/does/plays/builds/runs/reads/swims/carries] {m} [rounds/trips/parts/tours/turns/{bs}]|{k} [teams/groups/workers/people/players/members] [make/do/play/run/carry] {m} [rounds/trips/parts/tours/turns/{bs}] each
[A/Each/Every/One] [round/trip/part/tour/turn/one] [has/takes/is/needs/means/contains/counts] {p} [miles/minutes/points/steps/meters/{A}]|[One is/Each of these is/Each of those has] {p} [miles/minutes/points/steps/meters/{A}] [long/each/]
? How many [miles/minutes/points/steps/meters/{A}] [is that/are that/is it/do they have/is that for all of them/do all of them make] [in all/altogether/together/in total/]
= k * m : in all
= x * p : in all

n 5-90, m 2-40, r 2-40
[There are/A {G} has/{P} has/{P} sees/{P} counts] {n} {A}
There are {m} more {B} than {A}|{B} [are/there are] {m} more than {A}|The {B} [are/number] {m} more [than the {A}/]
~ There are [also /]{r} {C}|{r} {C} [are there too/live there as well/are also there/come along]
? How many [are there in all/are there altogether/is that in total/are they together/of all kinds are there/does that make in all]
= n + m : {B}
= n + x + r : in all

n 5-90, k 2-4
[There are/A {G} has/{P} has/{P} sees/{P} counts/{P} draws] {n} {A} and [{k} times/] as many {B}|[There are/A {G} has/{P} has] {n} {A}, and there are {k} times as many {B} [/as {A}]
~ [{P} also has/There are also/Besides there are/{P} buys/{P} brings/And there are] {r} {C}|{r} {C} [are there too/come along/are added]
? How many [are there in all/are there altogether/is that in total/things are there together/of all kinds are there/does {P} have altogether]
= n * k : {B}
= n + x + r : in all

n 5-90
[There are/A {G} has/{P} has/{P} finds/{P} grows/{P} draws] {n} {A} and [twice/double] as many {B}|[There are/A {G} has/{P} has/{P} grows] {n} {A} and [double/twice] the number of {B}
~ [{P} also has/There are also/Besides there are/{P} gets/And there are] {r} {C}|{r} {C} [are there too/come along/are added/join them]
? How many [are there in all/are there altogether/is that in total/things are there together/of all kinds are there/is that with the {C}]
= n * 2 : {B}
= n + x + r : in all

n 5-90
[There are/A {G} has/{P} has/{P} finds/{P} grows] {n} {A} and [twice/double] as many {B}
? How many [are there in all/are there altogether/is that in total/are there together/{A} and {B} are there]
= n * 2 : {B}
= n + x : in all

m 2-25, k 2-30, r 2-20
[Every/Each] [minute/hour/day/second/week] {m} [liters/gallons/tons/cups/{A}] [flow/run/pour/come/drip/fall/go] [into a tank/into a well/in/into a {b}/from a pipe/out of a hose/into a pool]|A [pipe/hose/tap/machine/stream/river/pump] [gives/brings/pours/makes/delivers/carries] {m} [liters/gallons/tons/cups/{A}] [a minute/an hour/per hour/each day/every second]
[/It runs /This goes on /It stays on ]for {k} [minutes/hours/days/seconds/weeks]|It [runs/lasts/goes on/is open/works] {k} [minutes/hours/days/seconds]|That [takes/lasts] {k} [minutes/hours/days/seconds]
But {r} [/of them/liters/gallons] [are lost/leak/leak out/run out/are spilled/dry up/go to waste/are used/flow away/are thrown out]|{r} [/of them] [are lost/leak out/are spilled/dry up/go to waste/are used]
? How [much/many] [is left/are left/remain/is in it then/does that leave/stays/is there in the end]
= m * k : in all
= x - r : left

n 3-30, k 2-5
{P} is {n} years old|{P} is {n}|{P} [turned/is now/became] {n}|{n} is {P}'s age
{h} [father/mother/uncle/cousin/teacher/boss/neighbor/brother/sister/grandma/friend] {Q} is {k} times [as old/that old/that age/{h} age/older]|{Q} is {k} times as old as [{P}/{s} is/{o}]|{P}'s [father/mother/uncle/cousin/boss/brother] {Q} is {k} times [as old/{h} age]
? How old is {Q}|What is {Q}'s age|What age is {Q}|How many years old is {Q}
= n * k : years

n 8-80, r 2-30
{P} is {n} years old|{P} is {n}|{P} [turned/is now] {n}|{n} is {P}'s age
{Q} is {r} years older [/than {P}]|{P} has [a brother/a sister/a friend/a cousin], {Q}, who is {r} years older|{P} is {r} years younger than {Q}|{Q} [came into the world/had a first birthday] {r} years [earlier/sooner]|When {P} came into the world, {Q} was {r}
? How old is {Q}|What is {Q}'s age|What age is {Q}|How many years old is {Q}
= n + r : years

n 30-80, r 2-25
{P} is {n} years old|{P} is {n}|{P} [turned/is now] {n}|{n} is {P}'s age
{Q} is {r} years younger [/than {P}]|{P} has [a brother/a sister/a friend/a cousin], {Q}, who is {r} years younger|{P} is {r} years older than {Q}|{Q} [came into the world/had a first birthday] {r} years later|When {Q} came into the world, {P} was {r}
? How old is {Q}|What is {Q}'s age|What age is {Q}|How many years old is {Q}
= n - r : years

n 3-90
{P}, {Q} and {R} [pool/share/join/collect/mix/count/bring along/combine/add up/gather] their {A}|{P}, {Q} and {R} [each have/all have/have] some {A}
{P} [has/had/gives/adds/owns/puts in/offers/holds/finds] {n}, {Q} [has /had /gives /adds /owns /offers /finds /]{m}[ and/,] {R} [has /had /gives /adds /owns /finds /]{r}|{P} has {n}. {Q} has {m}. {R} has {r}
? How many {A} [is that/are there/are that/do the three have/do they own/have they] [in total/in all/altogether/]
= n + m + r : {A}

k 2-12, m 2-60, n = k * m
[A/The] [rope/board/wire/chain/pipe/string/road/wall/cake/log/path/fence/stick/film] [is/measures/has/takes] {n} [cm/inches/feet/meters/minutes/miles] [long/in length/] and is [split/sawn/broken/divided/chopped/sliced] into {k} [equal/even/identical] [parts/sections/bits/slices/lengths]|{P} [splits/saws/divides/chops/breaks/slices] [a rope/a board/a wire/a log/a stick/a cake] of {n} [cm/inches/feet/meters] into {k} [equal/even/identical] [parts/sections/bits/lengths]
? How long is [one/each/every one/a single one]|What [length/size] [has each/does each have/is one of them]|What is the length of one [part/section/bit/of them]
= n / k : long

k 2-12, m 2-60, n = k * m
{P} [has/makes/gets/finds/bakes/prints/owns/grew/built/sewed/sorts/counts] {n} {A}|[A/The] {G} [has/makes/gets/builds/prints/grows] {n} {A}|{n} {A} [must be moved/must be packed/have to be stored/are to be sent/are waiting]
[A/Each/Every/One] {b} [holds/takes/carries/fits/can hold/contains/stores] {k} [/of them/{A}]|{k} [/of them/{A}] [fit in/go in/go into/are put in/are packed in] [a/each/every/one] {b}|{s} [puts/packs/stores/places] {k} in [a/each/every] {b}
? How many {bs} [are needed/are used/does {s} need/does it take/are filled/must be bought/will be full/are there then]|What number of {bs} [is needed/is used/is that]
= n / k : {bs}

n 2-30, p 2-20, k 2-60
[A/The] [taxi/gym/club/hotel/plan/repair/car/boat/plumber/course/bike/party] costs ${n} [at the start/to begin with/once/to join/as a fee/for coming/as a base], [and/plus/then] ${p} [for every/for each/per/a] [mile/hour/day/visit/minute/lesson/guest]|[Renting/Hiring/Using] [a taxi/a boat/a bike/a car/a room/a tool] [is/costs/means paying] ${n} plus ${p} [a/per/for each/for every] [mile/hour/day/visit/minute]
? [How much is/How much does one pay for/What do/What is the price of/What is the cost of/How much are] {k} [miles/hours/days/visits/minutes/lessons/guests]|{P} [uses it for/takes/needs/books/stays] {k} [miles/hours/days/minutes]. How much does {s} pay
= k * p : dollars
= n + x : dollars

n 60-300, k 2-9, p 2-12
{P} [has/had/takes/carries/brings/has saved/finds/got] ${n} [/along/with {o}/in {h} bag/in {h} wallet/for food]|{P} [goes/went/walks/drives] to [a/the] {G} with ${n}
[There, /] {s} [buys/gets/orders/picks/pays for/chooses/wants] {k} {A} [at/for] ${p} [each/apiece/a piece]|{A} [are/cost/sell for/go for] ${p} [each/apiece/per unit], and {s} [buys/gets/wants/chooses/picks/orders] {k} [/of them]|[Each/One] of the {A} [is/costs] ${p}. {s} [buys/gets/wants/chooses/picks/brings home] {k}
? How much [money is left/is left/does {P} have left/money does {s} have then/remains/money does {P} keep/is still there]|How many dollars [are left/remain/does {P} have/does {s} keep/has {P} left]
= k * p : dollars
= n - x : dollars

m 4-60, r 1-20, n = m * 2
{P} [has/had/made/cooked/drew/bought/prints/owns/counts/picks/grew] {n} {A}|There [are/were] {n} {A} in [the/a] {b}
[Half/One half] [of them/of the {A}] [are sold/are given to {Q}/go to {Q}/are lost/break/are eaten/get wet/are used/were taken/are mailed], and [then/later/after that/also/]{r} [/more/others] [are lost/are sold/go bad/are used/are taken/disappear/are eaten/break]|{s} [gives/sells/mails/hands] half [of them/of the {A}] [/to {Q}] and [loses/eats/uses/breaks/throws out/keeps for later] {r}
? How many {A} [are left/remain/are still there/does {P} have left/does that leave/stay/are there now]
= n / 2 : {A}
= x - r : {A}

k 2-9, m 4-40, n = k * m
{P} [has/had/made/bought/owns/counts] {n} {A} and [shares/splits/divides] them [evenly/equally/fairly] [with/among/between] {k} [people/friends/kids/guests/teams/classes]|{n} {A} are [shared/split/divided/dealt] [evenly/equally/fairly] [among/between] {k} [people/friends/kids/guests/teams/players]
? How many [does each/does each one/does every one of them/does one of them] [get/receive/have/take]|What does each [get/receive]
= n / k : {A} each

k 2-9, m 4-40, r 1-30, n = k * m
[In/At] a {G} there are {n} {A}. They [are put/go/are packed/are sorted] into {k} [equal/even] {bs}|{P} [puts/packs/sorts/divides] {n} {A} into {k} [equal/even] {bs}
[Then/Later/Afterwards] {r} [/more] {A} are [added to/put in/placed in/dropped in] [each/every] [{b}/one]|{P} adds {r} [/more/{A}/more {A}] to [each/every one/each of them]
? How many {A} are in [each/one/every] {b} [now/then/]
= n / k : {A} in each
= x + r : {A} in each

k 2-20, m 2-12, r 2-12
{P} [works/trains/reads/plays/cooks/sings/studies/paints/drives/rides] {m} hours [a/each/every/per] day [and/,] {k} days [a/each/per] [week/month/year]|{P} [works/trains/studies/practices] {k} days [a week/a month], {m} hours [each day/a day/every time]
? How many hours [is that/does {s} do/are that] in {r} [weeks/months/years]
= m * k : hours
= x * r : hours

n 10-200
{P} [scores/gets/earns/makes/wins/has/collects] {n} points [on Monday/in round one/in the first game/at first/one day], {m} [on Tuesday/in round two/in the next game/more later/the next day] [and/,] {r} [on Wednesday/in the last one/in the last game/at the end/the day after]|On three days {P} [sells/makes/writes/counts/sees] {n}, {m} and {r} {A}
? What [is the total/is that in all/is {h} total/does that make]|How many [is that/are that/is it/did {s} get] [in all/altogether/together]
= n + m + r : in all

n 30-300, m 2-29
{P} [has/owns/counts/collects/sells/makes/drives/earns/picks/writes] {n} [{A}/miles/points/dollars], {Q} [has /owns /counts /collects /sells /makes /picks /]{m} [fewer/less]|{Q} [has/owns/counts/collects/sells/makes/picks] {m} [fewer/less] than {P}, who [has/owns/counts/collects/sells/picks] {n}
? How many [do they have/do both have/are that/is that/do {P} and {Q} have] [together/in all/altogether/in total]
= n - m : for {Q}
= n + x : together

n 30-300, m 2-90
{P} [has/owns/counts/collects/sells/makes/drives/earns/picks] {n} [{A}/miles/points/dollars], {Q} [has /owns /counts /collects /sells /makes /picks /]{m} more|{Q} [has/owns/counts/collects/sells/makes/picks] {m} more than {P}, who [has/owns/counts/collects/sells] {n}
? How many [do they have/do both have/are that/is that/do {P} and {Q} have] [together/in all/altogether/in total]
= n + m : for {Q}
= n + x : together

n 20-200, k 2-6
{P} [has/owns/counts/collects/sells/makes/picks] {n} {A}. {Q} [has/owns/counts/collects/sells/makes/picks] {k} times as many
[Then/Later/On the way home/But] {Q} [loses/gives away/sells/drops/breaks/eats/mails] {m} [/of them/of {h} own/{A}]
? How many [does {Q} have/has {Q} left/are left for {Q}/does {Q} own/does {Q} keep] [now/in the end/]
= n * k : {A} for {Q}
= x - m : {A}

k 2-15, p 2-40, r 2-60
{P} [earns/makes/gets/charges/is paid] ${p} [for every/for each/per/a] [hour/lawn/car/lesson/dog/room/day]
[This week/Today/In May/On Saturday/] {s} [does/did/had/worked/finished/has/takes/took] {k} [hours/lawns/cars/lessons/dogs/rooms/days/of them]
[But {s}/{s}/Then {s}/And {s}] [pays/spends/needs/gives/loses/owes/hands] [{Q}/somebody/{h} helper/the owner/] ${r} [for tools/for gas/for food/for the bus/]
? How much [does {s} keep/money is left/is left/does {P} have then/does {P} take home/remains/profit does {P} make]
= k * p : dollars
= x - r : dollars

k 2-15, p 2-40, r 2-60
{P} [earns/makes/gets/charges/is paid/asks] ${p} [for every/for each/per/a] [hour/lawn/car/lesson/dog/room/day]
[This week/Today/In May/On Saturday/] {s} [does/did/had/worked/finished/has/takes/took] {k} [hours/lawns/cars/lessons/dogs/rooms/days/of them]
[{Q}/A client/{h} aunt/Somebody/{h} boss] [also /]gives {o} [an extra/a tip of/a bonus of/another] ${r}
? How much [does {s} have/money is that/does {s} get/does {P} make/does {P} take home/is that in total]
= k * p : dollars
= x + r : dollars

k 2-12, p 2-30, q 2-9
{P} [buys/gets/orders/takes] {k} {A} [at/for] ${p} [each/apiece] and [pays/gives/spends] ${q} [for shipping/for a bag/for delivery/in tax/as a tip/for wrapping/for parking]|{k} {A} cost ${p} each. [Shipping/Delivery/A bag/Tax/Parking] [is/costs/adds] ${q} [more/]
? How much [does {P} pay/is it/does it cost/money is that/does {s} spend/is the whole bill/must be paid] [in total/altogether/in all/]
= k * p : dollars
= x + q : dollars

k 2-12, p 8-40, q 1-7
{P} [buys/gets/orders/takes] {k} {A} [that cost/at/for] ${p} [each/apiece]. {s} [has/uses/gets/shows] [a coupon for/a coupon worth/a discount of/a card worth] ${q} [off/]|{k} {A} [cost/are] ${p} each, and {P} [gets/has/is given] ${q} [off/off the price/back/less to pay]
? How much [does {P} pay/does {s} pay/is it then/is to pay/must {s} pay/money is that]
= k * p : dollars
= x - q : dollars

p 20-90, q 1-19, k 2-9
[One/Each/A single one] of the {A} [usually costs/costs/is sold for/is] ${p}, but [today/now/this week/on sale] [it is/each is/they are] ${q} [cheaper/less/off] [each/]
? How much [are/do {k} of them cost/is the price for] {k} [/{A}/of them]|{P} [buys/gets/takes] {k}. How much [does {s} pay/is that]
= p - q : dollars
= x * k : dollars

n 40-400, k 2-12, m 2-12
{P} [has/owns/starts with/bakes/makes] {n} {A} and [puts/packs/places/sorts] {m} [/of them] in[to /] each of {k} {bs}|{n} {A} are there. {m} [/of them/{A}] go into each of {k} {bs}
? How many {A} [do not fit/are left/are left out/remain/are not packed/stay outside]
= k * m : {A}
= n - x : {A}

k 2-12, m 2-30, r 2-12, q 2-30
{P} [has/packs/carries/buys/counts] {k} {bs} [with/of] {m} {A} [each/in each] and {r} {bs} [with/of] {q} [/{A}] [each/in each]|There are {k} {bs} of {m} {A} and {r} {bs} of {q} {A}
? How many {A} [are there/are that/is that/does {P} have/are in all the {bs}] [altogether/in total/in all/together/]
= k * m : {A}
= r * q : {A}
= x + y : {A}

k 2-12, m 2-30, r 2-12, q 2-12
[In/On] [the first/one] [day/week/hour/table/bus/floor] there are {k} {A}. [In/On] [each/every] [of the next/of the other/later of] {r} there are {m}
? How many {A} [are there/is that] [altogether/in total/in all]
= r * m : {A}
= k + x : {A}

n 60-400, k 2-12, m 2-30
[A/The] [bus/train/boat/hall/{G}] [has/holds/fits/has room for] {n} [people/guests/{A}/seats]
{k} [groups/classes/families/teams] of {m} [people/guests/each] [are in it/come/get in/sit down/arrive/enter]
? How many [places/seats/] are [free/empty/left/open/still free]|How many [more can come/more fit in/more can get in]
= k * m : taken
= n - x : free

n 10-90, m 10-90, r 5-40, w = n + m + r
[On/In] [Monday/May/the first day/week one] {P} [sells/makes/reads/picks/cleans/sees] {n} {A}, [on/in] [Tuesday/June/the second day/week two] {m}
? How many more [must {s}/does {P} need to/does {s} have to] [sell/make/reach/get/do] to [reach/get to/make/have] {w} [/in all/altogether]
= n + m : {A}
= w - x : {A}
"""


@dataclass(frozen=True)
class Frame:
    """ranges: letter -> (low, high); given: (letter, expression); facts: (alternatives, whether it may move);
    work: (expression, unit)."""

    ranges: dict[str, tuple[int, int]]
    given: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, bool], ...]
    asks: str
    work: tuple[tuple[str, str], ...]


_DEFAULT = {"n": (10, 300), "m": (2, 60), "k": (2, 12), "r": (2, 60), "p": (2, 20), "q": (2, 20)}
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_LARGEST = 20_000
_OPERATIONS: dict[str, Callable[..., Worked]] = {"+": plus, "-": minus, "*": times, "/": divide}
_CONTAINERS = "box bag basket crate jar packet carton case shelf tray bucket drawer pack tin sack chest bin album van truck".split()
_PLACES = (
    "shop store market park farm museum barn garden hall zoo school yard port station hotel office lake camp kitchen "
    "warehouse forest club theater stadium kiosk cellar tower village house mill studio gym hospital castle depot nursery "
    "greenhouse workshop attic cafe shed salon harbor airport tent mall"
).split()


def _parse(text: str) -> Frame:
    head, *lines = text.strip().split("\n")
    ranges, given = dict(_DEFAULT), []
    for spec in head.split(", "):
        letter, _, rest = spec.partition(" ")
        if rest.startswith("= "):
            given.append((letter, rest[2:]))
        else:
            low, high = rest.split("-")
            ranges[letter] = (int(low), int(high))
    facts = tuple((line.removeprefix("~ "), line.startswith("~ ")) for line in lines if line[0] not in "?=")
    (asks,) = (line[2:] for line in lines if line.startswith("? "))
    work = [line[2:].split(" : ") for line in lines if line.startswith("= ")]
    return Frame(ranges, tuple(given), facts, asks, tuple((expression, unit) for expression, unit in work))


FRAMES = tuple(map(_parse, _TEXT.split("\n\n")))


def framed(d: Wording) -> Story:
    """A problem told by one of the frames."""
    frame = d.one(*FRAMES)
    while (found := _numbers(d, frame)) is None:
        pass
    numbers, results = found
    who = words.person(d)
    b = words.any_word(d) if d.chance(0.1) else d.one(*_CONTAINERS)
    slots = {letter: str(int(value)) for letter, value in numbers.items()} | {
        "P": who.name, "Q": words.person(d).name, "R": words.person(d).name, "s": who.he, "o": who.him, "h": who.his,
        "A": words.thing(d), "B": words.thing(d), "C": words.thing(d), "b": b, "bs": plural_of(b),
        "G": words.any_word(d) if d.chance(0.15) else d.one(*_PLACES),
    }  # fmt: skip
    facts = [(expand(d, text), moves) for text, moves in frame.facts]
    told = [text for text, moves in facts if not moves]
    for text in (text for text, moves in facts if moves):
        told.insert(d.number(1, len(told)), text)
    question = _sentences([*told, expand(d, frame.asks)], slots)
    steps = tuple(
        f"{result.work} {unit.format(**slots)}" for result, (_, unit) in zip(results, frame.work, strict=True)
    )
    return Story(question + "?", steps, results[-1])


def expand(d: Wording, text: str) -> str:
    """One of the alternatives apart by `|`, and in it one of each bracket's, apart by `/`."""
    return _CHOICE.sub(lambda m: d.one(*m[1].split("/")), d.one(*text.split("|")))


def _sentences(texts: list[str], slots: dict[str, str]) -> str:
    out = []
    for text in texts:
        said = _ARTICLE.sub(r"\1n ", " ".join(text.format(**slots).split()).replace(" ,", ","))
        out.append(". ".join(cap(part) for part in said.split(". ")))
    return ". ".join(out)


def _numbers(d: Wording, frame: Frame) -> tuple[dict[str, int], list[Worked]] | None:
    """Numbers drawn again and the results of the work; None if one would be negative, broken or too large."""
    numbers: dict[str, int] = {
        letter: d.amount(low, high) if high > 60 else d.number(low, high)
        for letter, (low, high) in frame.ranges.items()
    }
    try:
        for letter, expression in frame.given:
            numbers[letter] = _worked(expression, numbers)
        results: list[Worked] = []
        for expression, _ in frame.work:
            results.append(_worked(expression, numbers | dict(zip("xyz", results, strict=False))))
            if not 0 < results[-1] < _LARGEST:
                return None
    except ValueError:
        return None
    return numbers, results


def _worked(expression: str, numbers: dict[str, int]) -> Worked:
    """`n - k` or `n + m + r`. Precedence is not needed but in `k * m + r`, which has its product first."""
    first, sign, *rest = expression.split()
    terms = [numbers[first] if first in numbers else int(first)]
    terms += [numbers.get(name) or int(name) for name in rest[::2]]
    if sign == "*" and len(terms) == 3:
        return plus(times(terms[0], terms[1]), terms[2])
    return _OPERATIONS[sign](*terms)


STORIES = (framed,)
