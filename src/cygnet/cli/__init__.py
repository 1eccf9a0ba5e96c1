"""The `cygnet` command: one file per verb. Nothing heavy is imported until a verb runs, so that `--help` is instant."""
