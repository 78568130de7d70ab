#!/bin/sh
# The `llm` command: plain and streamed answers, a tool and a schema. Its settings lie in a folder that is removed.
set -eu
url=${PENSTOCK_URL:-http://127.0.0.1:8000}/v1
LLM_USER_PATH=$(mktemp -d)
trap 'rm -r "$LLM_USER_PATH"' EXIT
export LLM_USER_PATH LLM_LOAD_PLUGINS=
export OPENAI_API_KEY="${PENSTOCK_API_KEY:-none}"
name=$(curl -s -H "Authorization: Bearer $OPENAI_API_KEY" "$url/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
cat >"$LLM_USER_PATH/extra-openai-models.yaml" <<MODELS
- {model_id: penstock, model_name: "$name", api_base: "$url", supports_tools: true, supports_schema: true}
MODELS

case $1 in
plain) llm -m penstock --no-stream -o max_tokens 16 'Name a river.' ;;
streamed) llm -m penstock -o max_tokens 16 'Name a river.' ;;
tools)
	functions='def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: rain"'
	llm -m penstock -o max_tokens 100 --functions "$functions" --tools-debug 'What is the weather in Bern? Call get_weather.'
	;;
structured) llm -m penstock -o max_tokens 200 --schema 'name, long bool' 'Name a river.' ;;
esac
