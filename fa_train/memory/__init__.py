"""Ways to fit long sequences in GPU memory, and the planner that predicts how much memory a run needs."""
