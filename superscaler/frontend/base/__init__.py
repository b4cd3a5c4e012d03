"""What all parts of the frontend read: a traced program, its results, training, refusals; the captured step."""
