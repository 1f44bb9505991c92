"""What halfstep says about a program: findings, the cards of the rules, and the registry of rules."""
