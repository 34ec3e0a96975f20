"""The Attention tab: what its pages ask TensorBoard for."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard import errors
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from attnmon.plugin import SAMPLES_KEPT
from attnmon.plugin.store import MissingError, Store
from attnmon.records import PLUGIN, UnreadableError, to_json

__all__ = ["AttentionPlugin"]

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("index", "chart", "colours", "controls", "data", "dom", "heatmap", "host", "state", "view", "warnings")
_FILES = {"style.css": "text/css"} | {f"{name}.js": "text/javascript" for name in _SCRIPTS}
_MOST_STEPS = 64  # of one request
_MOST_HEADS = 64


class _BadRequestError(ValueError):
    """An argument is missing or wrong; the text says which."""


class AttentionPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # TensorBoard has no annotations
    """Serves the tab's page, lists as JSON, and tensors as the base64 of float32 (JSON has no NaN).

    Args:
        context: TensorBoard's.
    """

    plugin_name = PLUGIN

    def __init__(self, context: base_plugin.TBContext) -> None:
        if context.data_provider is None:
            raise ValueError("Expected TensorBoard to have a data provider, but got none (--generic_data=false).")
        asked = (context.sampling_hints or {}).get(PLUGIN)
        self._store = Store(context.data_provider, SAMPLES_KEPT if asked is None else asked)
        self._frontend = base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="Attention")
        self._files = {name: (_STATIC / name).read_bytes() for name in _FILES}

    def is_active(self) -> bool:
        """False: TensorBoard itself knows whether there is data under the plugin's name."""
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Where the page starts and what its tab is called."""
        return self._frontend

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """One route per question, and one per file: no path leads out of these."""
        routes: dict[str, Callable[..., Any]] = {f"/static/{name}": self._file(name) for name in _FILES}
        questions = {
            "/catalogue": self._catalogue,
            "/run": self._run,
            "/summary": self._summary,
            "/frames": self._frames,
            "/series": self._series,
        }
        return routes | {route: _answering(question) for route, question in questions.items()}

    def _file(self, name: str) -> Callable[..., Any]:
        @wrappers.Request.application
        def serve(request: wrappers.Request) -> wrappers.Response:
            return _not_get(request) or _respond(request, self._files[name], _FILES[name])

        return serve

    def _catalogue(self, request: wrappers.Request) -> dict[str, Any]:
        return self._store.catalogue(*_who(request))

    def _run(self, request: wrappers.Request) -> dict[str, Any]:
        found = self._store.run(*_who(request), _text(request, "run"), _text(request, "prefix"))
        return found | {"warnings": [_short(alert) for alert in found["warnings"]]}

    def _summary(self, request: wrappers.Request) -> dict[str, Any]:
        samples = self._store.samples(*_who(request), _text(request, "run"), _text(request, "tag"))
        answer: dict[str, Any] = {
            "steps": samples.steps,
            "wall_times": samples.wall_times,
            "shape": samples.shape,
            "extent": samples.extent(),
            "problems": samples.problems,
            "restarts": samples.restarts,
            "kept": len(samples.steps) if samples.full else None,
        }
        if "baseline" in request.args:
            answer["change"] = samples.change(_integers(request, "baseline", 1)[0])
        return answer

    def _frames(self, request: wrappers.Request) -> dict[str, Any]:
        steps = _integers(request, "steps", _MOST_STEPS)
        samples = self._store.samples(*_who(request), _text(request, "run"), _text(request, "tag"))
        frames = {step: samples.frame(step) for step in steps}
        return {
            "frames": [
                {"step": step, "shape": frame.shape, "data": _base64(frame)}
                for step, frame in frames.items()
                if frame is not None
            ],
            "missing": [step for step, frame in frames.items() if frame is None],
        }

    def _series(self, request: wrappers.Request) -> dict[str, Any]:
        heads = _heads(request)
        run, prefix, tag = (_text(request, name) for name in ("run", "prefix", "tag"))
        quantity = _text(request, "quantity")
        content = self._store.content(*_who(request), run, tag)
        for name, asked in (("prefix", prefix), ("quantity", quantity)):
            if content.get(name, asked) != asked:
                raise _BadRequestError(
                    f"Expected `{name}` to be that of the tag, {content[name]!r}, but got {asked[:80]!r}."
                )
        samples = self._store.samples(*_who(request), run, tag)
        alerts = self._store.run(*_who(request), run, prefix)["warnings"]
        limits, problems = self._store.limits(*_who(request), run, prefix, quantity)
        return {
            "steps": samples.steps,
            "heads": [
                {
                    "layer": layer,
                    "head": head,
                    "data": _base64(samples.head(layer, head)),
                    "marks": [_mark(alert, layer, head, quantity) for alert in alerts if _names(alert, layer, head)],
                }
                for layer, head in heads
            ],
            "limits": [
                {
                    **{name: content[name] for name in ("rule", "title", "severity", "rises")},
                    "steps": own.steps,
                    "heads": [_base64(own.head(layer, head)) for layer, head in heads],
                }
                for content, own in limits
            ],
            "problems": problems,
        }


def _answering(question: Callable[[wrappers.Request], dict[str, Any]]) -> Callable[..., Any]:
    """A WSGI application that answers in JSON, and in words where it can't."""

    @wrappers.Request.application
    def answer(request: wrappers.Request) -> wrappers.Response:
        if (refused := _not_get(request)) is not None:
            return refused
        try:
            return _respond(request, to_json(question(request)), "application/json")
        except _BadRequestError as error:
            return _respond(request, str(error), "text/plain", 400)
        except MissingError as error:
            return _respond(request, str(error), "text/plain", 404)
        except UnreadableError as error:
            return _respond(request, f"This can't be read: {error}", "text/plain", 422)
        except errors.PublicError:
            raise  # TensorBoard answers with its code
        except Exception as error:
            logging.getLogger("tensorboard").exception("attnmon: %s", request.path)
            text = f"The Attention tab has a fault ({type(error).__name__}); TensorBoard's log has the details."
            return _respond(request, text, "text/plain", 500)

    return answer


def _not_get(request: wrappers.Request) -> wrappers.Response | None:
    if request.method in ("GET", "HEAD"):
        return None
    return _respond(request, f"Expected GET, but got {request.method}.", "text/plain", 405)


def _respond(request: wrappers.Request, content: bytes | str, kind: str, code: int = 200) -> wrappers.Response:
    # Never cached: data grows while a run goes on, and an update of attnmon brings other pages
    response: wrappers.Response = http_util.Respond(request, content, kind, code=code)
    return response


def _who(request: wrappers.Request) -> tuple[Any, str]:
    from tensorboard import plugin_util  # loaded by then; what it imports warns

    return plugin_util.context(request.environ), plugin_util.experiment_id(request.environ)


def _text(request: wrappers.Request, name: str) -> str:
    value = request.args.get(name, "")
    if not value:
        raise _BadRequestError(f"Expected `{name}` to be given, but got nothing.")
    return value


def _integers(request: wrappers.Request, name: str, most: int) -> list[int]:
    text = request.args.get(name, "")
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= most:
        what = "a step" if most == 1 else f"1 to {most} steps with commas between them"
        raise _BadRequestError(f"Expected `{name}` to be {what}, but got {text[:80]!r}.")
    return numbers


def _heads(request: wrappers.Request) -> list[tuple[int, int]]:
    text = request.args.get("heads", "")
    try:
        pairs = [tuple(int(number) for number in part.split(".")) for part in text.split(",")]
    except ValueError:
        pairs = []
    if not 1 <= len(pairs) <= _MOST_HEADS or not all(len(pair) == 2 and min(pair) >= 0 for pair in pairs):
        raise _BadRequestError(
            f"Expected `heads` to be 1 to {_MOST_HEADS} pairs such as 3.7 (layer 3, head 7) with commas between them, "
            f"but got {text[:80]!r}."
        )
    return [(pair[0], pair[1]) for pair in pairs]


def _base64(array: NDArray[np.float32]) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode("ascii")


def _short(alert: Mapping[str, Any]) -> dict[str, Any]:
    """An alert for the list, without its figures."""
    return {**alert, "evidence": [part["quantity"] for part in alert["evidence"]]}


def _names(alert: Mapping[str, Any], layer: int, head: int) -> bool:
    return head in alert["heads"].get(layer, ())


def _mark(alert: Mapping[str, Any], layer: int, head: int, quantity: str) -> dict[str, Any]:
    """What an alert says of one head; its figures where it is this quantity that it speaks of."""
    rows = (part["rows"].get((layer, head)) for part in alert["evidence"] if part["quantity"] == quantity)
    figure, baseline, limit = next((row for row in rows if row is not None), (None, None, None))
    found = {name: alert[name] for name in ("step", "since", "rule", "title", "severity")}
    return found | {"figure": figure, "baseline": baseline, "limit": limit}
