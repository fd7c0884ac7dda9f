"""How the owner of a node pauses it, or takes it back: by files in the node's state directory, where its key is, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 0.5


class OwnerSwitch:
    """Whether a file is there that the owner makes and removes; it lasts beyond the agent's process, as the file does."""

    def __init__(self, state_dir: str, file: str) -> None:
        """Without a state directory nothing can set it."""
        self._file = Path(state_dir) / file if state_dir else None
        self.on = False

    def look(self) -> bool:
        """Set `on` by whether the file is there; return whether that is a change."""
        before = self.on
        self.on = self._file is not None and self._file.exists()
        return self.on != before

    def clear(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self.on = False

    async def watch(self, on_change: Callable[[bool], None]) -> None:
        """Tell `on_change` of every change until cancelled, whether it is on then."""
        while self._file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.look():
                on_change(self.on)
