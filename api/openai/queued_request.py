"""Queued request: the fields that all requests share that become jobs, and what the queue reads of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator

from api.openai.fields import Metadata, QueueOptions, StrictBody
from penstock.engine import ModelCard, Sampling, Task
from penstock.tools import Tools
from streaming.jobs.job import Prompt, ResponseForm, TaskForm
from streaming.order import Priority

TIERS = {
    "default": Priority.STANDARD,
    "flex": Priority.BATCH,
    "scale": Priority.INTERACTIVE,
    "priority": Priority.INTERACTIVE,
    "fast": Priority.INTERACTIVE,
}
"""The lane of each `service_tier`; `auto` means the endpoint's default."""

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class QueuedRequest(StrictBody, ABC):
    """A request that becomes one job."""

    LANE: ClassVar[Priority] = Priority.INTERACTIVE
    ON_DISCONNECT: ClassVar[str] = "cancel"

    model: Annotated[str, Field(min_length=1, max_length=128, description="A name from `GET /v1/models`.")]
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None,
        description="OpenAI's word for the lane: default is standard, flex is batch, the last three are interactive.",
    )
    metadata: Metadata | None = Field(None, description="Your own labels; the job shows them.")
    user: Annotated[str, Field(max_length=256)] | None = Field(None, description="Kept with the job.")
    queue: QueueOptions = Field(QueueOptions(), description="Penstock's own options.")

    @field_validator("queue", mode="before", json_schema_input_type=QueueOptions | None)
    @classmethod
    def _queue_or_null(cls, value: Any) -> Any:
        return QueueOptions() if value is None else value

    @property
    def default_lane(self) -> Priority:
        return self.LANE

    @property
    def default_on_disconnect(self) -> str:
        return self.ON_DISCONNECT

    @property
    def lane(self) -> Priority:
        """Return the requested lane; `queue.priority` overrides `service_tier`."""
        if self.queue.priority:
            return Priority(self.queue.priority)
        return TIERS.get(self.service_tier or "auto", self.default_lane)

    @property
    def on_disconnect(self) -> str:
        """What happens to the job when its reader disconnects."""
        return self.queue.on_disconnect or self.default_on_disconnect

    @property
    def known_to_servers(self) -> dict[str, Any]:
        """Fields that are read here and that a model's server may know too, by their names there. The tier is none
        of them if `queue` names a lane: it then says nothing."""
        tier = None if self.queue.priority else self.service_tier
        return {"user": self.user, "metadata": self.metadata or None, "service_tier": tier}

    @property
    @abstractmethod
    def prompt_asked(self) -> Prompt: ...

    @property
    @abstractmethod
    def sampling(self) -> Sampling: ...

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return False

    @property
    def effort(self) -> Effort | None:
        """How much the model shall reason; None: as much as it does by itself."""
        return None

    @property
    def tools_asked(self) -> Tools | None:
        """The functions that the answer may call. Raises ApiError (400)."""
        return None

    @property
    def choices_per_prompt(self) -> int:
        return 1

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream of chunks ends with the token counts."""
        return False

    @property
    def response_form(self) -> ResponseForm | None:
        """What the Responses API shows of the request; None for the other endpoints."""
        return None

    @property
    def version_read(self) -> int | None:
        """The version of the conversation whose turn the request is, as it was read; None if it is no turn of one."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether each text begins with its prompt."""
        return False

    @property
    def task_asked(self) -> Task | None:
        """What it asks for instead of generated texts."""
        return None

    def task_for(self, card: ModelCard | None) -> Task | None:
        """What a model is asked for instead of generated texts. `card`: the model's, if one is known."""
        return self.task_asked

    @property
    def task_form(self) -> TaskForm:
        """What the answer to a task shows."""
        return TaskForm()
