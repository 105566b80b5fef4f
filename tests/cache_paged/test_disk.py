"""The tier in a folder: whatever happens to its files, it gives back what it was handed, or nothing."""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infer.errors import SettingsError
from infer_cache_paged import disk
from infer_cache_paged.disk import DiskTier
from infer_cache_paged.tier import BlockKey, TierProtocol

HEAD = b'{"checkpoint": "that one"}'
PAYLOAD = 5000


def key(index: int, head: bytes = HEAD, *, nbytes: int = PAYLOAD) -> BlockKey:
    about = b"\n".join((head, b'{"part": 0}', b"tokens %d" % index))
    return BlockKey(f"{index:06x}-{index:064x}.0", about, nbytes)


def payload(index: int, nbytes: int = PAYLOAD) -> bytearray:
    return bytearray(random.Random(index).randbytes(nbytes))


def fill(tier: TierProtocol, count: int) -> None:
    for index in range(count):
        tier.put(key(index), payload(index))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens the folder, after closing what has it open."""
    tiers: list[DiskTier] = []

    def open_(limit: int = 1 << 30, head: bytes = HEAD, clock: Callable[[], float] | None = None) -> DiskTier:
        for tier in tiers:
            tier.close()
        tiers.append(DiskTier(tmp_path / "kept", head, limit, **({} if clock is None else {"clock": clock})))
        return tiers[-1]

    yield open_
    for tier in tiers:
        tier.close()


def paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != disk.LOCK)


def test_what_was_put_is_there_after_a_restart(opened: Callable[..., DiskTier]) -> None:
    tier = opened()
    fill(tier, 3)
    for each in (tier, opened()):
        assert [each.contains(key(i).name) for i in range(4)] == [True, True, True, False]
        assert [each.get(key(i)) for i in range(3)] == [payload(i) for i in range(3)]
        assert each.get(key(3)) is None
    found = opened().first()
    assert found is not None
    assert found[0] == key(0).head
    assert found[1] == payload(0)


def test_only_the_user_can_read_it(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        fill(opened(), 1)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in paths(tmp_path)}
    assert modes == {0o600}
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_a_file_says_itself_what_it_is(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    fill(opened(), 1)
    (path,) = paths(tmp_path)
    head, found = disk.read(path, path.stat().st_size)
    assert (head, found) == (key(0).head, payload(0))


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _longer(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 9)))


def _zeros(path: Path, draw: random.Random) -> None:
    """As a file system may leave a file when the power fails."""
    path.write_bytes(bytes(path.stat().st_size))


def _swapped(path: Path, draw: random.Random) -> None:
    other = draw.choice([each for each in path.parent.iterdir() if each != path])
    path.write_bytes(other.read_bytes())


def _noise(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(path.stat().st_size))


def _gone(path: Path, draw: random.Random) -> None:
    path.unlink()


def _link(path: Path, draw: random.Random) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


FAULTS = [_flip, _cut, _longer, _zeros, _swapped, _noise, _gone, _link, _folder, _pipe]


@pytest.mark.parametrize("restart", [False, True], ids=["while it is open", "before a restart"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_file_that_is_not_what_was_written(
    fault: Callable[[Path, random.Random], None],
    restart: bool,
    opened: Callable[..., DiskTier],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    draw = random.Random(fault.__name__)
    for _ in range(20 if fault in (_flip, _cut, _longer) else 2):
        tier = opened()
        fill(tier, 4)
        victim = draw.randrange(4)
        path = next(path for path in paths(tmp_path) if path.name == key(victim).name)
        fault(path, draw)
        caplog.clear()
        tier = opened() if restart else tier
        assert tier.get(key(victim)) is None
        assert not tier.contains(key(victim).name)
        assert fault is _gone or key(victim).name in caplog.text, "the log names it"
        others = [i for i in range(4) if i != victim]
        assert [tier.get(key(i)) for i in others] == [payload(i) for i in others]
        if path.is_dir():
            path.rmdir()


def test_the_first_whole_block_of_this_model_is_tried(
    opened: Callable[..., DiskTier], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened()
    fill(tier, 3)
    _flip(next(path for path in paths(tmp_path) if path.name == key(0).name), random.Random(0))
    foreign = DiskTier(tmp_path / "foreign", b"another", 1 << 30)
    foreign.put(key(1, b"another"), payload(1))
    foreign.close()
    (other,) = paths(tmp_path / "foreign")
    other.rename(next(path for path in paths(tmp_path / "kept") if path.name == key(1).name))
    found = opened().first()
    assert found is not None
    assert found[0] == key(2).head
    assert "is of another model" in caplog.text


def test_generations_do_not_see_each_other_but_share_the_limit(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    fill(opened(), 3)
    tier = opened(head=b"another")
    assert not tier.contains(key(0).name)
    assert tier.get(key(0)) is None
    size = paths(tmp_path)[0].stat().st_size
    tier = opened(limit=4 * size, head=b"another")
    for index in range(4):
        tier.put(key(index, b"another" * 20), payload(index))
    assert sum(path.stat().st_size for path in paths(tmp_path)) <= 4 * size


def test_bytes_stay_below_the_limit_and_the_least_recently_used_go_first(
    opened: Callable[..., DiskTier], tmp_path: Path
) -> None:
    now = [1e9]
    fill(opened(clock=lambda: now[0]), 1)
    size = paths(tmp_path)[0].stat().st_size
    limit = 20 * size
    tier = opened(limit, clock=lambda: now[0])
    for index in range(60):
        now[0] += 100
        tier.put(key(index), payload(index))
        tier.touch([key(0).name])
        assert sum(path.stat().st_size for path in paths(tmp_path)) <= limit
        assert tier.contains(key(0).name), "it has been used again and again"
        assert tier.contains(key(index).name)
    kept = [i for i in range(60) if tier.contains(key(i).name)]
    assert kept == [0, *range(60 - len(kept) + 1, 60)]
    assert len(kept) > 15
    for path in paths(tmp_path):
        os.utime(path, (now[0], now[0]))
    tier = opened(limit - 3 * size, clock=lambda: now[0])  # of those that were used at one time, the longest go first
    assert [i for i in range(60) if tier.contains(key(i).name)] == kept[:16]


def test_what_is_no_tiers_is_named_and_left_alone(
    opened: Callable[..., DiskTier], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(opened(), 2)
    own = paths(tmp_path)[0].parent
    foreign = [tmp_path / "kept" / "notes.txt", own / "notes.txt", own / f"{key(0).name}.bak"]
    for path in foreign:
        path.write_text("mine")
    draft = own / f".{key(7).name}"
    draft.write_bytes(b"half of it")
    tier = opened()
    assert not draft.exists()
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert all(f"{path} is not a tier's, and ignored" in caplog.text for path in foreign)
    tier.clear()
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert not tier.contains(key(0).name)
    assert paths(own) == sorted(foreign[1:])


def test_files_can_be_listed_while_others_go(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    """As `infer cache list` does beside a server."""
    for head in (HEAD, b"another"):
        fill(opened(head=head), 3)
    one, other = sorted((tmp_path / "kept").glob("?" * 32))
    found = disk.files(tmp_path / "kept")
    names = [next(found)[0]]
    (one / key(1).name).unlink()
    shutil.rmtree(other)
    assert [*names, *(name for name, _ in found)] == [f"{one.name}/{key(i).name}" for i in (0, 2)]


def test_a_start_removes_generations_without_files(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    fill(opened(), 1)
    opened(head=b"another")
    (own,) = {path.parent for path in paths(tmp_path)}
    assert len([*own.parent.glob("?" * 32)]) == 2
    opened().clear()
    assert [*own.parent.glob("?" * 32)] == [own]
    fill(opened(), 1)
    assert opened().contains(key(0).name)


def test_a_folder_belongs_to_one_process(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier = opened()
    fill(tier, 1)
    with pytest.raises(SettingsError, match=r"cache.paged.disk is '.*kept', which another process uses; give each"):
        DiskTier(tmp_path / "kept", HEAD, 1 << 30)
    assert tier.get(key(0)) == payload(0)
    tier.close()
    DiskTier(tmp_path / "kept", HEAD, 1 << 30).close()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "within"):
        with pytest.raises(
            SettingsError, match=r"cache.paged.disk is '.*file.*', which cannot be used: .*; give a fold"
        ):
            DiskTier(folder, HEAD, 1 << 30)


def test_a_full_disk_is_logged_once_and_later_ones_are_kept(
    opened: Callable[..., DiskTier], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The system refuses to make a file longer, as it does where there is no room."""
    tier = opened()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAYLOAD // 2, before[1]))
    try:
        fill(tier, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "nothing is kept for the time being" in caplog.text
    assert paths(tmp_path) == []
    assert not any(tier.contains(key(i).name) for i in range(5))
    fill(tier, 2)
    assert tier.get(key(1)) == payload(1)


def test_a_payload_above_the_limit_removes_nothing(opened: Callable[..., DiskTier]) -> None:
    tier = opened(3 * PAYLOAD)
    fill(tier, 2)
    tier.put(key(5, nbytes=4 * PAYLOAD), payload(5, 4 * PAYLOAD))
    assert tier.get(key(0)) == payload(0)
    assert not tier.contains(key(5).name)


def killed(folder: Path, seed: int, limit: int) -> int:
    """Let another process write, kill it after a number of blocks that the seed says, and return that number."""
    draw = random.Random(seed)
    count, (reader, writer) = draw.randint(0, 12), os.pipe()
    child = os.fork()
    if not child:
        try:
            tier = DiskTier(folder, HEAD, limit)
            for index in range(seed % 7, 1000):
                os.write(writer, b".")
                tier.put(key(index % 40, nbytes=PAYLOAD), payload(index % 40))
                tier.get(key(index % 3))
        finally:
            os._exit(1)
    os.close(writer)
    for _ in range(count):
        os.read(reader, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    return count


@pytest.mark.parametrize(
    ("rounds", "limit"),
    [
        (10, 1 << 30),
        pytest.param(200, 1 << 30, marks=pytest.mark.slow),
        pytest.param(50, 90_000, marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_leaves_whole_files_or_none(
    rounds: int, limit: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, found = tmp_path / "kept", 0
    for seed in range(rounds):
        killed(folder, seed, limit)
        tier = DiskTier(folder, HEAD, limit)
        for index in range(40):
            got = tier.get(key(index))
            assert got is None or got == payload(index)
            found += got is not None
        tier.close()
        assert not list(folder.glob("*/.*"))
        assert sum(path.stat().st_size for path in paths(folder)) <= limit
    assert "is removed" not in caplog.text, "what has its name is whole"
    assert found > 3 * rounds
