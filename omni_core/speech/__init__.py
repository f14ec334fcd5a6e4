"""Speech from text: the request, what a family supplies, and the front end of a served speech model."""
