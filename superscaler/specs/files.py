"""The names of the files of a plan directory."""

PLAN_FILE, EXPLAIN_FILE, JOURNAL_FILE = "plan.json", "explain.json", "journal.txt"
MODEL_FILE, PROGRAM_FILE, RUN_FILE = "model.txt", "program.txt", "run.py"
WEIGHTS_FILE = "initial.safetensors"
