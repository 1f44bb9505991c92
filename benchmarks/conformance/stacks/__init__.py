"""One module a stack: `run(job)` trains it in the idiom of the stack's documentation, which `LINKS` names."""
