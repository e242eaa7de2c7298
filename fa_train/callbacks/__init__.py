"""Lightning callbacks: each watches or guards one side of a run."""
