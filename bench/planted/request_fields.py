"""Planted bugs: of request fields that not every engine has, and of the reasoning before an answer."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

ENGINES = "tests/workers/engines/"

REQUEST_FIELDS = (
    bug(
        "a text that tokenizes for long",
        "A megabyte of digits keeps a core of the worker busy for seconds, whoever sends it and however often.",
        Edit("workers/engines/llamacpp/tasks.py", "if max_tokens_of(parts) > most:", "if max_tokens_of(parts) < 0:"),
        ENGINES + "llamacpp/test_tasks.py::test_a_text_that_would_take_the_tokenizer_long_is_refused",
    ),
    bug(
        "vectors without end",
        "One request for embeddings keeps an API process busy for ten seconds and more.",
        Edit("streaming/jobs/capabilities.py", "job.prompt.groups]) * size <= most:", "job.prompt.groups]) <= most:"),
        "tests/streaming/jobs/test_capabilities.py::"
        "test_vectors_are_refused_where_an_answer_would_have_too_many_numbers",
    ),
    bug(
        "sampling that an older worker leaves out",
        "A job with top_k or logit_bias looks like any other, so a worker that knows neither samples without them.",
        Edit("streaming/jobs/job.py", "        return ExtendedJob\n", "        return Job\n"),
        "tests/streaming/jobs/test_codec.py::test_a_job_with_further_sampling_is_of_a_version_of_its_own",
    ),
    bug(
        "a field that a server would refuse",
        "The neutral value of a field goes to a server that does not know the field.",
        Edit(
            "workers/engines/upstream/continuation/bodies.py",
            "if sampling.min_p is not None and facts.min_p:",
            "if sampling.min_p is not None:",
        ),
        ENGINES + "upstream/continuation/test_bodies.py::test_a_server_gets_no_field_that_it_lacks",
    ),
    bug(
        "a penalty that forgets the beginning",
        "A text with a repetition penalty is continued by a server that may not count what was generated before.",
        Edit(
            "workers/engines/upstream/continuation/ladder.py",
            "if sampling.repetition_penalty not in (None, 1.0) and not facts.repetition_span:",
            "if False:",
        ),
        (
            ENGINES + "upstream/continuation/test_ladder.py::"
            "test_a_repetition_penalty_continues_where_it_counts_the_prompt"
        ),
    ),
    bug(
        "a tag that is lost at a cut",
        "A token that may be a part of a tag is logged without its text, so another attempt never sees the tag.",
        Edit(
            "workers/engines/reasoning.py",
            "            self._kept.append(replace(piece, text=shown))\n            return Piece(piece.id)\n",
            "            return replace(piece, text=shown)\n",
        ),
        ENGINES + "test_reasoning.py::test_another_attempt_continues_after_any_piece",
    ),
    bug(
        "marks that a model writes",
        "A model that writes a control character turns its answer into reasoning.",
        Edit("workers/engines/reasoning.py", "self._held += without_marks(piece.text)", "self._held += piece.text"),
        ENGINES + "test_reasoning.py::test_a_model_cannot_write_marks",
    ),
)
