"""Event files of TensorBoard, written with the package tensorboard alone."""

import json
import secrets
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 5


class EventLog:
    """Writes one event file into a folder.

    first_step: from which on TensorBoard hides the values that older files of the folder have;
        None hides nothing.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        # Nobody can put a link under a name that is not known before.
        suffix = f".{secrets.token_hex(4)}"
        self._writer = EventFileWriter(
            str(folder), flush_secs=FLUSH_SECONDS, filename_suffix=suffix
        )
        if first_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(first_step, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write the values of a step, without those that are None."""
        summary = self._summary.Summary()
        for tag, value in values.items():
            if value is not None:
                summary.value.add(tag=tag, simple_value=value)
        self._add(step, summary=summary)

    def picture(self, step: int, tag: str, png: bytes) -> None:
        """Write a picture."""
        width, height = struct.unpack(">II", png[16:24])
        image = self._summary.Summary.Image(
            height=height, width=width, colorspace=4, encoded_image_string=png
        )
        self._add(step, summary=self._summary.Summary(value=[{"tag": tag, "image": image}]))

    def text(self, step: int, tag: str, content: Any) -> None:
        """Write a value as indented JSON, which TensorBoard shows under Text."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        lines = json.dumps(content, indent=2, ensure_ascii=False).splitlines()
        markdown = "\n".join(f"    {line}" for line in lines)
        self._add(step, summary=text_pb(tag, markdown))

    def flush(self) -> None:
        """Write the pending events to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Write the pending events and close the file."""
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))
