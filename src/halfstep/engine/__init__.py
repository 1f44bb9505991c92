"""The engine performs updates."""

from halfstep.engine.engine import Engine
from halfstep.engine.ledger import Cause, Entry, Ledger
from halfstep.engine.update import Update
from halfstep.engine.window import Window

__all__ = ["Cause", "Engine", "Entry", "Ledger", "Update", "Window"]
