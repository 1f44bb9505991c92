"""How the recorder hears: torch's public hooks where there is one, a narrow wrapper where there is none."""
