"""How training runs: one step, lanes over devices, several processes. Knows no files."""
