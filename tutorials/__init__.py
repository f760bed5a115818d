"""The lessons: notebooks in reading order, what they share, and the exercises."""
