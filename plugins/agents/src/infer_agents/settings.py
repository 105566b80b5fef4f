"""The package's settings."""

from __future__ import annotations

from pydantic import BaseModel, Field, SecretStr


class AgentsSettings(BaseModel, extra="forbid"):
    key: SecretStr | None = Field(
        None,
        description="what seals reasoning that clients send back; the same for all servers that continue each other's "
        "conversations; none for a key of this machine's own",
    )
