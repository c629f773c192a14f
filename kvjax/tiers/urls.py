"""Tiers by URL."""

import re
from typing import Any, get_args
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvjax._checks import integer, one_of, shown, size, text
from kvjax.tiers.tier import Tier, Write

DEFAULT_MAX_BYTES = 100 * 2**30

_FORMS = "file:///path, s3://bucket/path/, gs://bucket/path/, redis://, rediss:// or redis+unix://"
_REDIS = ("redis", "rediss", "redis+unix")
_COMMON = ("max_bytes", "write", "timeout_s", "max_pending_bytes")
_ANY_REGION = "us-east-1"
OPTIONS: dict[str, tuple[str, ...]] = {"file": _COMMON, "gs": _COMMON, "s3": (*_COMMON, "endpoint", "region")}
_OBJECT_THREADS = 16  # requests wait for the network, not for a CPU

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_OPTION = re.compile(r"[a-z_]{1,32}")
_SECONDS = re.compile(r"(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,9})?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\])(:[0-9]{1,5})?/?")
_REGION = re.compile(r"[a-z0-9-]{1,32}")


def open_tier(url: str, *, show_progress: bool | None = None) -> Tier:
    """Returns the tier that a URL names.

    * `file:///path`: files below a folder, which is made if it is not there.
    * `s3://bucket/path/`: objects; credentials come from the environment (`AWS_ACCESS_KEY_ID`,
      `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`). A server that is down is asked again later.
    * `gs://bucket/path/`: by the same code, which has not been run on such a store.
    * `redis://`, `rediss://`, `redis+unix://`: see `kvjax.tiers.redis.open_redis`.

    Options follow a `?`, joined by `&`: `max_bytes` (default `100GiB`) and `max_pending_bytes`, digits with an optional
    B, KiB, MiB, GiB or TiB; `write` (`through`, `back` or `never`); `timeout_s`; for S3 also `endpoint` (such as
    `http://127.0.0.1:9000`) and `region` (with an `endpoint` us-east-1 by default; name it for AWS, too: without it
    AWS is asked, and threads may be stuck if it cannot be reached then).

    Args:
        url: of the tier. What a path holds of `%`, `?` and `#` is escaped, as in all URLs.
        show_progress: of looking through what the tier holds; `None` shows it where standard error is a terminal.

    Raises:
        ValueError: the URL is none of these, or its folder cannot be used, or a package is missing. No secret that a
            URL may hold is told.
    """
    text(url, "url")
    if _CONTROL.search(url):
        raise ValueError("`url` must hold no control characters")
    scheme = url.partition("://")[0]
    if scheme == url or not (scheme in OPTIONS or scheme in _REDIS):
        raise ValueError(f"`url` must be {_FORMS}, got {_shown(scheme, url)}")
    try:
        if scheme in _REDIS:
            from kvjax.tiers.redis import open_redis

            return open_redis(url)
        return _open_kvstore(url, show_progress)
    except ImportError as error:
        extra = "redis" if scheme in _REDIS else "tiers"
        raise ValueError(f"{scheme}:// needs a package that is not there: pip install 'kvjax[{extra}]'") from error


def _open_kvstore(url: str, show_progress: bool | None) -> Tier:
    from kvjax.tiers.file_store import FileStore
    from kvjax.tiers.kvstore import KVStoreTier
    from kvjax.tiers.object_store import ObjectStore

    parts = _split(url)
    given = _options(parts)
    settings: dict[str, Any] = {"max_bytes": DEFAULT_MAX_BYTES, **_settings(given)}
    path = _path(parts)
    if parts.scheme == "file":
        store = FileStore(f"file://{path}", path, writable=settings.get("write") != "never")
    else:
        store = ObjectStore(f"{parts.scheme}://{parts.netloc}/{path}", _spec(parts, path, given))
        settings["num_threads"] = _OBJECT_THREADS
    return KVStoreTier(store, **settings, show_progress=show_progress)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:  # its text repeats the host
        raise ValueError("`url` must be a URL, and its host is none") from None
    if parts.fragment or url.endswith("#"):
        raise ValueError("`url` must have no fragment; a `#` of a path is written %23")
    if "@" in parts.netloc:
        raise ValueError("`url` must hold no credentials: those of object stores come from the environment")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError("`url` must name an absolute path, as file:///path does")
    elif not _BUCKET.fullmatch(parts.netloc):
        raise ValueError(
            f"`url` must name a bucket, of 3 to 63 lower-case letters, digits, dots and dashes, "
            f"as {parts.scheme}://bucket/path/ does"
        )
    return parts


def _path(parts: SplitResult) -> str:
    """Returns the path of a folder, as a file system takes it, or the beginning of objects' names."""
    try:
        path = unquote(parts.path, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("`url` must have a path in UTF-8") from None
    names = [name for name in path.split("/") if name]
    if _CONTROL.search(path) or {".", ".."}.intersection(names):
        raise ValueError("`url` must have a path without `.`, `..` and control characters")
    if parts.scheme == "file":
        return "/" + "/".join(names)
    return "".join(f"{name}/" for name in names)


def _options(parts: SplitResult) -> dict[str, str]:
    known = OPTIONS[parts.scheme]
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict")
    except ValueError:
        raise ValueError("`url` must have options of the form name=value, joined by &") from None
    options: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            shown = repr(name) if _OPTION.fullmatch(name) else "another"
            raise ValueError(f"an option of {parts.scheme}:// must be one of {', '.join(known)}, got {shown}")
        if name in options:
            raise ValueError(f"`{name}` must be given once in a URL")
        options[name] = value
    return options


def _settings(options: dict[str, str]) -> dict[str, Any]:
    """Returns the arguments of a tier that its options stand for. Whatever is wrong is told before a folder is made."""
    settings: dict[str, Any] = {}
    for name in ("max_bytes", "max_pending_bytes"):
        if name in options:
            settings[name] = integer(size(options[name], f"`{name}`"), name, at_least=1)
    if "write" in options:
        settings["write"] = one_of(options["write"], get_args(Write), "write")
    if "timeout_s" in options:
        settings["timeout_s"] = float(_match(_SECONDS, options, "timeout_s", "a positive number of seconds"))
    return settings


def _spec(parts: SplitResult, path: str, options: dict[str, str]) -> dict[str, Any]:
    """Returns the spec of TensorStore's driver."""
    spec = {"driver": "gcs" if parts.scheme == "gs" else parts.scheme, "bucket": parts.netloc, "path": path}
    if "endpoint" in options:
        if not _ENDPOINT.fullmatch(options["endpoint"]):
            raise ValueError("`endpoint` must be http://host:port or https://host:port, and hold nothing else")
        spec["endpoint"] = options["endpoint"].rstrip("/")
    if "endpoint" in options:
        # Without a region TensorStore asks the server for it, and if that is down, threads of the process are stuck
        # for good. Servers of one's own hardly care.
        spec["aws_region"] = _ANY_REGION
    if "region" in options:
        spec["aws_region"] = _match(_REGION, options, "region", "lower-case letters, digits and dashes")
    return spec


def _match(form: re.Pattern[str], options: dict[str, str], name: str, rule: str) -> str:
    if not form.fullmatch(options[name]):
        raise ValueError(f"`{name}` must be {rule}, got {shown(options[name])}")
    return options[name]


def _shown(scheme: str, url: str) -> str:
    """Returns what may be told of a URL whose scheme is none of ours."""
    if scheme == url:
        return "a plain path: write file:// and the absolute path" if url.startswith(("/", ".", "~")) else "no URL"
    return f"{scheme}://…" if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,20}", scheme) else "another"
