"""What is kept of a run: its folder, rows, seals, checkpoints, environment, event files."""
