"""From requests to events: scheduling, passes of the model, and answers."""
