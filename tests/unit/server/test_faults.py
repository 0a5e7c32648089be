"""What the application makes of clients that leave, of impossible wishes, and of answers that are hard to render."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from octavo.runner.scripted import RowFailure
from support.asgi import Call, application, sample
from support.scripted import model_of, spell, until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN = {"prompt": "x", "max_tokens": 5}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_was_not_refused(stream: bool) -> None:
    async def main() -> None:
        async with application(spell("abc") * 1000, itl_s=0.01) as (app, metrics):
            call = Call(app, TEXT, {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": stream})
            running = asyncio.create_task(call.run())
            if stream:
                await call.answered.wait()
            else:
                await until(lambda: sample(metrics, "vllm:num_requests_running") == 1)
            call.leave()
            async with asyncio.timeout(5):
                await running
            await until(lambda: sample(metrics, "vllm:request_success_total", finished_reason="abort") == 1)
            assert sample(metrics, "vllm:admission_rejections_total") == 0
            assert sample(metrics, "http_requests_total", status="499") == 1
            assert call.status == (200 if stream else 0)

    asyncio.run(main())


def test_several_prompts_start_together_or_not_at_all() -> None:
    async def main() -> None:
        async with application(spell("abc"), max_num_queued_reqs=8) as (app, metrics):
            call = Call(app, TEXT, {"prompt": ["x"] * 3, "n": 3, "max_tokens": 5, "temperature": 1})
            await call.run()
            assert call.status == 429
            assert sample(metrics, "vllm:admission_rejections_total") == 1
            assert sample(metrics, "vllm:request_params_n_count") == 0
            call = Call(app, TEXT, {"prompt": ["x"] * 2, "n": 4, "max_tokens": 5, "temperature": 1})
            await call.run()
            assert call.status == 200
            assert sample(metrics, "vllm:request_success_total") == 8

    asyncio.run(main())


def test_without_a_bound_any_number_of_logprobs_is_given() -> None:
    async def main() -> None:
        model = model_of(max_logprobs=-1)
        async with application(spell("abc"), model=model) as (app, _):
            for count, shown in ((0, 0), (25, 25), (-1, model.vocab_size)):
                call = Call(
                    app, CHAT, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": count}
                )
                body = await call.run()
                assert call.status == 200, body
                for entry in body["choices"][0]["logprobs"]["content"]:
                    assert len(entry["top_logprobs"]) == shown
                call = Call(app, TEXT, PLAIN | {"logprobs": count, "echo": True})
                body = await call.run()
                assert call.status == 200, body
                tops = body["choices"][0]["logprobs"]["top_logprobs"][-1]
                # By text, so that parts of characters, which all look alike, are one.
                assert len({"\ufffd" if text > "\x7f" else text for text in tops}) == max(min(shown, 130), 1)
            for count in (-2, -(2**70)):
                call = Call(app, TEXT, PLAIN | {"logprobs": count})
                assert (await call.run())["error"]["param"] == "logprobs"
                assert call.status == 400

    asyncio.run(main())


def test_bounded_logprobs_do_not_give_everything() -> None:
    async def main() -> None:
        async with application(spell("abc"), model=model_of(max_logprobs=20)) as (app, _):
            for count in (-1, 21):
                call = Call(app, TEXT, PLAIN | {"logprobs": count})
                assert (await call.run())["error"]["param"] == "logprobs"

    asyncio.run(main())


def test_an_id_without_a_token_is_shown_without_text() -> None:
    """Models pad their embeddings: there are logits for ids that the tokenizer does not know."""

    async def main() -> None:
        async with application(lambda start: [70_000, 97] if start.num_prompt_tokens == 1 else spell("ok")) as (app, _):
            padded = Call(app, TEXT, PLAIN | {"logprobs": 1, "max_tokens": 2})
            plain = Call(app, TEXT, PLAIN | {"prompt": "xy"})
            first, second = await asyncio.gather(padded.run(), plain.run())
            assert first["choices"][0]["logprobs"]["tokens"] == ["", "a"]
            assert first["choices"][0]["text"] == "a"
            assert second["choices"][0]["text"] == "ok"

    asyncio.run(main())


def test_a_failure_to_render_one_answer_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.text.detokenizer import Detokenizer

    push = Detokenizer.push

    def fragile(self: Detokenizer, token_ids: Any) -> str:
        if 122 in token_ids:
            raise ZeroDivisionError("a bug")
        return push(self, token_ids)

    monkeypatch.setattr(Detokenizer, "push", fragile)

    async def main() -> None:
        async with application(lambda start: spell("zz" if start.num_prompt_tokens == 1 else "abcde")) as (
            app,
            metrics,
        ):
            calls = [Call(app, TEXT, PLAIN | {"prompt": prompt}) for prompt in ("x", "xy", "xyz")]
            answers = await asyncio.gather(*(call.run() for call in calls))
            assert [call.status for call in calls] == [500, 200, 200]
            assert "bug" not in str(answers[0])
            assert [answer["choices"][0]["text"] for answer in answers[1:]] == ["abcde"] * 2
            await until(lambda: sample(metrics, "vllm:num_requests_running") == 0)

    asyncio.run(main())


def test_prompt_logprobs_of_a_chat_come_in_both_modes() -> None:
    async def main() -> None:
        async with application(spell("abc")) as (app, _):
            body = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 2, "n": 2, "temperature": 1}
            whole = await Call(app, CHAT, body).run()
            assert len(whole["prompt_logprobs"]) > 2
            call = Call(app, CHAT, body | {"stream": True})
            await call.run()
            chunks = [json.loads(part[6:]) for part in call.parts if part.startswith(b"data: {")]
            assert chunks[0]["prompt_logprobs"] == whole["prompt_logprobs"]
            assert not any("prompt_logprobs" in chunk for chunk in chunks[1:])

    asyncio.run(main())


def test_what_has_no_effect_is_refused_by_name() -> None:
    async def main() -> None:
        async with application(spell("abc")) as (app, _):
            for field, value in (("priority", 5), ("priority", -1)):
                call = Call(app, TEXT, PLAIN | {field: value})
                error = (await call.run())["error"]
                assert (call.status, error["param"], error["code"]) == (400, field, "invalid_value")
            for neutral in ({"priority": 0}, {"priority": None}):
                call = Call(app, TEXT, PLAIN | neutral)
                await call.run()
                assert call.status == 200

    asyncio.run(main())


def test_priorities_are_obeyed() -> None:
    async def main() -> None:
        options = {"scheduling_policy": "priority", "max_num_seqs": 1, "itl_s": 0.01}
        async with application(spell("x" * 2000), **options) as (app, metrics):
            slow = Call(app, TEXT, PLAIN | {"max_tokens": 100, "priority": 5, "ignore_eos": True})
            running = asyncio.create_task(slow.run())
            await until(lambda: sample(metrics, "vllm:num_requests_running") == 1)
            urgent = Call(app, TEXT, PLAIN | {"max_tokens": 2, "priority": -1})
            await urgent.run()
            assert (urgent.status, running.done()) == (200, False)
            answer = await running
            assert (slow.status, answer["usage"]["completion_tokens"]) == (200, 100)
            assert sample(metrics, "octavo:preemptions_by_reason_total", reason="policy") == 1

    asyncio.run(main())


def test_a_request_over_its_deadline_gets_an_error_of_its_own() -> None:
    async def main() -> None:
        async with application(spell("x" * 2000), max_num_seqs=1, itl_s=0.01, decode_timeout=60.0) as (app, metrics):
            slow = Call(app, TEXT, PLAIN | {"max_tokens": 400, "ignore_eos": True, "decode_timeout": 0.5})
            running = asyncio.create_task(slow.run())
            await until(lambda: sample(metrics, "vllm:num_requests_running") == 1)
            waiting = Call(app, TEXT, PLAIN | {"waiting_timeout": 0.1})
            error = (await waiting.run())["error"]
            assert (waiting.status, error["code"], error["type"]) == (504, "waiting_timeout", "timeout_error")
            error = (await running)["error"]
            assert (slow.status, error["code"]) == (504, "decode_timeout")
            streamed = Call(
                app, TEXT, PLAIN | {"max_tokens": 400, "ignore_eos": True, "decode_timeout": 0.2, "stream": True}
            )
            await streamed.run()
            assert streamed.status == 200
            assert b"decode_timeout" in streamed.parts[-1] + streamed.parts[-2]
            assert sample(metrics, "octavo:request_errors_total", code="decode_timeout") == 2
            await until(lambda: sample(metrics, "vllm:kv_cache_usage_perc") == 0.0)
            wrong = Call(app, TEXT, PLAIN | {"prefill_timeout": 0})
            assert (await wrong.run())["error"]["param"] == "prefill_timeout"
            assert wrong.status == 400

    asyncio.run(main())


def test_errors_are_bounded_whatever_they_name() -> None:
    async def main() -> None:
        async with application(spell("abc")) as (app, _):
            deep: Any = 1
            for _ in range(100):
                deep = [deep]
            for body in (
                {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"k" * 1_000_000: deep}},
                {
                    "messages": [{"role": "user", "content": "x"}],
                    "stream": True,
                    "stream_options": {"k" * 1_000_000: 1},
                },
                {"messages": [{"role": "user", "content": "x"}], "k" * 1_000_000: 1},
                {"messages": [{"role": "k" * 1_000_000, "content": "x"}]},
                {"messages": [{"role": "user", "content": "x"}], "model": "k" * 1_000_000},
            ):
                call = Call(app, CHAT, body)
                await call.run()
                assert call.status in (400, 404)
                assert sum(map(len, call.parts)) < 2000

    asyncio.run(main())


def test_a_failed_row_is_an_error_of_the_server() -> None:
    async def main() -> None:
        async with application([RowFailure("broken")]) as (app, metrics):
            call = Call(app, TEXT, PLAIN)
            await call.run()
            assert call.status == 500
            assert sample(metrics, "vllm:request_success_total", finished_reason="error") == 1

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_stopping_server_gives_up_is_told(stream: bool) -> None:
    async def main() -> None:
        async with application(spell("abc") * 1000, itl_s=0.01) as (app, metrics):
            call = Call(app, TEXT, {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": stream})
            running = asyncio.create_task(call.run())
            await until(lambda: sample(metrics, "vllm:num_requests_running") == 1)
            if stream:
                await call.answered.wait()
            running.cancel()
            async with asyncio.timeout(5):
                await running
            assert call.status == (200 if stream else 503)
            assert stream or json.loads(call.parts[-1])["error"]["code"] == "not_ready"
            await until(lambda: sample(metrics, "vllm:num_requests_running") == 0)

    asyncio.run(main())
