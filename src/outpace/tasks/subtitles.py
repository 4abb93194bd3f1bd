"""Transcripts in file formats: SubRip, WebVTT and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Segment:
    """A stretch of speech and its text.

    Attributes:
        start: Start in seconds.
        end: End in seconds.
        text: The text.
    """

    start: float
    end: float
    text: str


def srt(segments: Sequence[Segment]) -> str:
    """Return segments as a SubRip file."""
    return "".join(
        f"{i}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{one.text.strip()}\n\n"
        for i, one in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """Return segments as a WebVTT file."""
    cues = (
        f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{_escaped(one.text.strip())}\n\n"
        for one in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def as_json(name: str, text: str, language: str | None, duration: float, segments: Sequence[Segment]) -> str:
    """Return a transcript as one line of JSON, so that several files make JSON lines."""
    whole = {"file": name, "text": text, "language": language, "duration": round(duration, 3)}
    return json.dumps({**whole, "segments": [asdict(one) for one in segments]}, ensure_ascii=False)


def _time(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _escaped(text: str) -> str:
    """Escape what would be a tag or an arrow in WebVTT."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
