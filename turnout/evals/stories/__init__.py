"""Templates of grade-school word problems. Each takes a Draw and returns a Story."""

from turnout.evals.stories import counting, journeys, kitchen, people, shopping

STORIES = (*shopping.STORIES, *counting.STORIES, *journeys.STORIES, *kitchen.STORIES, *people.STORIES)
