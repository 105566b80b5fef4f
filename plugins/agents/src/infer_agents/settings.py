"""The package's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, SecretStr


class AgentsSettings(BaseModel, extra="forbid"):
    key: SecretStr | None = Field(
        None,
        description="what seals reasoning that clients send back; the same for all servers that continue each other's "
        "conversations; none for a key of this machine's own",
    )
    billing_header: bool = Field(
        False,
        description="whether prompts keep Claude Code's system block x-anthropic-billing-header, which differs in "
        "every request, so that nothing behind it is found in the cache",
    )
    store: Path | None = Field(
        None,
        description="the file that keeps responses, which only servers of one machine can share; none for "
        "responses.db in ~/.local/state/infer",
    )
    store_default: bool = Field(
        True, description="whether a response is kept if its request does not say store: as in OpenAI's API"
    )
    store_max_bytes: int = Field(
        256 << 20, ge=0, description="how many bytes of responses are kept, the latest; 0 keeps none"
    )
    store_max_days: float = Field(30.0, gt=0, description="for how many days responses are kept")
