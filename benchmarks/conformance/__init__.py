"""Which stack computes what: small jobs of known right answer, run by each stack as its documentation shows."""
