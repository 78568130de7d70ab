"""OpenAPI schemas of the answers of the Responses API."""

from __future__ import annotations

from api.openai.answers import (
    BOOLEAN,
    CANCELLED_BY,
    FREE,
    INTEGER,
    NUMBER,
    STRING,
    Schema,
    any_of,
    list_of,
    maybe,
    object_of,
    page_of,
    schema,
    usage_of_responses,
    word_of,
)


def response_schemas() -> dict[str, Schema]:
    return {
        "Response": _response(),
        "ResponseUsage": usage_of_responses(),
        "OutputMessage": _item("output_text", role=word_of("assistant")),
        "InputMessage": _item(
            "input_text", "output_text", role=word_of("system", "developer", "user", "assistant", "tool")
        ),
        "CallItem": _call_item("function_call", name=STRING, arguments=STRING | {"description": "JSON"}),
        "CallOutputItem": _call_item("function_call_output", output=STRING),
        "OutputItem": any_of("OutputMessage", "CallItem"),
        "InputItem": any_of("InputMessage", "CallItem", "CallOutputItem"),
        "InputItemList": page_of("InputItem"),
        "Conversation": object_of(
            id=STRING,
            object=word_of("conversation"),
            created_at=INTEGER,
            metadata={"type": "object", "additionalProperties": STRING},
        ),
        "ConversationItem": any_of("InputMessage", "CallItem", "CallOutputItem", "ReasoningOutput"),
        "ReasoningOutput": object_of(
            id=STRING,
            type=word_of("reasoning"),
            status=word_of("in_progress", "completed", "incomplete"),
            summary=list_of(FREE),
            content=list_of(object_of(type=word_of("reasoning_text"), text=STRING)),
        ),
        "ConversationItemList": page_of("ConversationItem"),
        "InputTokens": object_of(object=word_of("response.input_tokens"), input_tokens=INTEGER),
    }


def _item(*kinds: str, role: Schema) -> Schema:
    part = object_of(type=word_of(*kinds), text=STRING)
    part["properties"] |= {"annotations": list_of(FREE), "logprobs": list_of(FREE)}
    refused = object_of(type=word_of("refusal"), refusal=STRING)
    return object_of(
        id=STRING,
        type=word_of("message"),
        status=word_of("in_progress", "completed", "incomplete"),
        role=role,
        content=list_of({"anyOf": [part, refused]} if "output_text" in kinds else part),
    )


def _call_item(kind: str, **fields: Schema) -> Schema:
    status = word_of("in_progress", "completed", "incomplete")
    return object_of(id=STRING, type=word_of(kind), status=status, call_id=STRING, **fields)


def _response() -> Schema:
    """Schema of a response. `served_by` is there only if another model gave the answer than `model`, and `cancelled_by`
    only if the response was cancelled."""
    response = object_of(
        id=STRING,
        object=word_of("response"),
        created_at=INTEGER,
        completed_at=maybe(INTEGER),
        conversation=maybe(object_of(id=STRING)),
        status=word_of("queued", "in_progress", "completed", "failed", "cancelled", "incomplete"),
        background=BOOLEAN,
        error=maybe(object_of(code=word_of("server_error", "invalid_prompt"), message=STRING)),
        incomplete_details=maybe(object_of(reason=word_of("max_output_tokens", "content_filter"))),
        instructions=maybe(STRING),
        max_output_tokens=maybe(INTEGER),
        max_tool_calls=maybe(INTEGER),
        model=STRING,
        output=list_of(schema("OutputItem")),
        parallel_tool_calls=BOOLEAN,
        previous_response_id=maybe(STRING),
        presence_penalty=NUMBER,
        frequency_penalty=NUMBER,
        prompt_cache_key=maybe(STRING),
        reasoning=FREE,
        safety_identifier=maybe(STRING),
        service_tier=word_of("priority", "default", "flex"),
        store=BOOLEAN,
        temperature=NUMBER,
        text=FREE,
        tool_choice={"anyOf": [STRING, FREE]},
        tools=list_of(FREE),
        top_logprobs=INTEGER,
        top_p=NUMBER,
        truncation=word_of("disabled"),
        usage=maybe(schema("ResponseUsage")),
        user=maybe(STRING),
        metadata={"type": "object", "additionalProperties": STRING},
    )
    response["properties"] |= {"served_by": STRING, "cancelled_by": CANCELLED_BY}
    return response
