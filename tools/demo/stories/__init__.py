"""Templates of grade-school word problems. Each takes a Draw and returns a Story."""

from tools.demo.stories import basics, chains, counting, journeys, kitchen, people, shopping

STORIES = (
    *shopping.STORIES, *counting.STORIES, *journeys.STORIES, *kitchen.STORIES, *people.STORIES,
    *basics.STORIES,
    *chains.STORIES,
)  # fmt: skip

# Drawn with equal chances. Chains come up more often, as their structure varies too.
DRAWN = (*STORIES, *chains.STORIES * 9)
