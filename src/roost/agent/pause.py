"""How the owner of a node pauses it: by a file in the node's state directory, where its key is, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from roost.config import PAUSE_FILE

LOOK_EVERY_S = 0.5


class PauseSwitch:
    """Whether the owner has paused this node; it lasts beyond the agent's process, as the file does."""

    def __init__(self, state_dir: str) -> None:
        """Without a state directory nothing can pause the node."""
        self._file = Path(state_dir) / PAUSE_FILE if state_dir else None
        self.paused = False

    def look(self) -> bool:
        """Set `paused` by whether the file is there; return whether that is a change."""
        before = self.paused
        self.paused = self._file is not None and self._file.exists()
        return self.paused != before

    async def watch(self, on_change: Callable[[bool], None]) -> None:
        """Tell `on_change` of every change until cancelled, whether the node is paused then."""
        while self._file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.look():
                on_change(self.paused)
