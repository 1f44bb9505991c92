"""Where the README's figures come from: each program measures both sides in one run and prints machine and spread."""
