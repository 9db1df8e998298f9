import stat

import pytest

from octavo.errors import ConfigError
from octavo.kv_connector.cluster_secret import cluster_secret


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path, text="k" * 64, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_users_own_key_is_made_once_for_the_user_alone(cache):
    first = cluster_secret(None)
    assert len(first) == 32
    assert cluster_secret(None) == first
    (file,) = cache.rglob("*.key*")  # no other file is left there
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_clusters_key_is_what_the_file_says(tmp_path):
    one, two = write(tmp_path / "one"), write(tmp_path / "two", "k" * 64 + "\n")
    other = write(tmp_path / "other", "l" * 64)
    assert cluster_secret(one) == cluster_secret(two)
    assert len({cluster_secret(one), cluster_secret(other), cluster_secret(None)}) == 3


def test_files_that_are_no_secret(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        cluster_secret(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="chmod 600"):
        cluster_secret(write(tmp_path / "open", mode=0o640))
    with pytest.raises(ConfigError, match="5 characters"):
        cluster_secret(write(tmp_path / "short", "short"))
