"""Answer schemas of tasks, for the OpenAPI document."""

from __future__ import annotations

from api.openai.answers import INTEGER, NUMBER, STRING, Schema, list_of, object_of, word_of


def task_answer_schemas() -> dict[str, Schema]:
    usage = object_of(prompt_tokens=INTEGER, total_tokens=INTEGER)
    vector: Schema = {"anyOf": [list_of(NUMBER), STRING | {"description": "With encoding_format base64."}]}
    ranked = object_of(index=INTEGER | {"description": "Of the document in the request."}, relevance_score=NUMBER)
    ranked["properties"]["document"] = object_of(text=STRING) | {"description": "With return_documents."}
    return {
        "EmbeddingList": object_of(
            object=word_of("list"),
            data=list_of(object_of(object=word_of("embedding"), index=INTEGER, embedding=vector)),
            model=STRING,
            usage=usage,
        ),
        "Ranking": object_of(
            id=STRING,
            object=word_of("list"),
            model=STRING,
            results=list_of(ranked) | {"description": "The best first."},
            usage=usage,
        ),
        "TokenIds": object_of(
            count=INTEGER, tokens=list_of(INTEGER), max_model_len=INTEGER | {"description": "The model's context."}
        ),
        "TokenText": object_of(prompt=STRING),
    }
