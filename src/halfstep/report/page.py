"""The page of a rule, from its card."""

from __future__ import annotations

from halfstep.findings.card import Card
from halfstep.findings.finding import Safety

_FIX = {
    Safety.SAFE: "`--fix` applies it: the numbers stay what they should be.",
    Safety.UNSAFE: "`--unsafe-fixes` applies it: it changes the numbers, which is its purpose.",
}

_MEASURED = "What only a measurement shows has no line that an edit could change."


def page(card: Card) -> str:
    """The page in Markdown."""
    return f"""# {card.name} ({card.code})

{card.severity.value}, since {card.since}, heard by {" and ".join(f"`{s}`" for s in card.speakers)}

{card.what}

## Why

{card.why}

## Example

```python
{card.example.rstrip()}
```

## Use instead

```python
{card.instead.rstrip()}
```

## Fix

{_FIX.get(card.fix, f"By hand. {card.unfixed or _MEASURED}")}
"""
