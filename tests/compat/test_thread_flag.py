"""A flag is on inside of its context, in one thread."""

import threading

import pytest

from glue_compiler.compat.thread_flag import ThreadFlag


def test_it_is_on_inside_and_ends_as_it_began():
    flag = ThreadFlag()
    with flag.on():
        with flag.on():
            assert flag.is_on
        assert flag.is_on
    assert not flag.is_on


def test_an_exception_ends_it():
    flag = ThreadFlag()
    with pytest.raises(ValueError, match="inside"), flag.on():
        raise ValueError("inside")
    assert not flag.is_on


def test_other_threads_do_not_see_it():
    flag, seen = ThreadFlag(), []
    with flag.on():
        thread = threading.Thread(target=lambda: seen.append(flag.is_on))
        thread.start()
        thread.join()
    assert seen == [False]
