"""How a configuration is shown in Python and in notebooks: by its settings other than defaults."""

from __future__ import annotations

from typing import Any

from deepstack.notebook import html_table


class Displayed:
    """Gives a configuration a short `repr` and a table for notebooks."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self._settings().items())
        return f"Config({settings})"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        settings = self._settings()
        usual = "all settings have their defaults" if not settings else "others have their defaults"
        return html_table(f"Config: {usual}", settings)

    def _settings(self) -> dict[str, Any]:
        from deepstack.config.identity import non_defaults  # imports the schema
        from deepstack.config.schema import Config

        return non_defaults(self) if isinstance(self, Config) else {}
