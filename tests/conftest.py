import pytest
from harness import Group, train


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the slow tests too")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: run with --all, or alone with -m slow")


def pytest_collection_modifyitems(config, items):
    if not (config.getoption("--all") or config.getoption("-m")):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --all"))


@pytest.fixture(scope="session")
def group():
    """group(n): the n processes that this test run keeps for its cases."""
    groups = {}

    def get(size):
        if size not in groups or not all(p.is_alive() for p in groups[size].processes):
            groups[size] = Group(size)
        return groups[size]

    yield get
    for each in groups.values():
        each.close()


@pytest.fixture(scope="session")
def one_device(group):
    """one_device(flags): what chapter 1 gives, with the weights before and after each step."""
    known = {}

    def get(flags):
        if flags not in known:
            (known[flags],) = group(1).run(train, 1, flags)
            result = known[flags]
            result["weights"] = [result["start"], *result["weights"]]
        return known[flags]

    return get
