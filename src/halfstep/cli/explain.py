"""`halfstep explain RULE`: a rule's card as a page."""

from __future__ import annotations

import argparse

from halfstep.findings.registry import all_cards, find_card
from halfstep.report.page import page


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("rule", nargs="?", help="a rule's name or code")
    parser.add_argument("--all", action="store_true", help="list every rule")


def run(args: argparse.Namespace) -> int:
    """Print the page of one rule, or the list of all."""
    if args.all or args.rule is None:
        for card in all_cards():
            print(f"{card.code}  {card.severity.value:<8} {card.name:<34} {card.what}")
        return 0
    print(page(find_card(args.rule)))
    return 0
