"""What a compile must leave as it was: torch's modes and settings, and Dynamo's own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.fuzz.process_settings import methods_of_dynamo, settings


@dataclass(frozen=True)
class ProcessState:
    settings: dict[str, Any]
    methods: dict[tuple[str, str], Any]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(settings(), methods_of_dynamo())

    def differences(self) -> list[str]:
        """What is not as it was."""
        now = ProcessState.now()
        found = [
            f"{name}: was {old}, is {now.settings[name]}"
            for name, old in self.settings.items()
            if old != now.settings[name]
        ]
        found += [
            f"{'.'.join(key)} is another object" for key, old in self.methods.items() if now.methods.get(key) is not old
        ]
        return [f"left behind: {each}" for each in found]
