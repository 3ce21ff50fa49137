"""Faces in boxes and in turned pictures, mapped back to the pixel."""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpen_core.errors import UsageError
from gpen_core.find import QUARTERS, Box, find_faces, is_upright, parse_box, pose, turned_back
from gpen_core.types import Face, Image
from tests.stubs import face_at

WIDTH, HEIGHT = 201, 150
COLOURS = np.array([[250, 0, 0], [0, 250, 0], [0, 0, 250], [250, 250, 0], [0, 250, 250]], np.uint8)


def drawn(*faces: Face) -> Image:
    """A grey picture with a coloured pixel for each landmark."""
    picture = np.full((HEIGHT, WIDTH, 3), 40, np.uint8)
    for face in faces:
        for (x, y), colour in zip(np.rint(face.landmarks).astype(int), COLOURS, strict=True):
            picture[y, x] = colour
    return picture


def whole(face: Face) -> Face:
    return Face(np.rint(face.box), np.rint(face.landmarks), face.score)


def read(picture: Image) -> list[Face]:
    """The one face that is drawn in a picture, if there is one."""
    spots = [np.argwhere((picture == colour).all(2)) for colour in COLOURS]
    if any(len(spot) != 1 for spot in spots):
        return []
    points = np.concatenate(spots)[:, ::-1].astype(float)
    return [Face(np.concatenate([points.min(0) - 3, points.max(0) + 3]), points, 0.9)]


def upright_only(picture: Image) -> list[Face]:
    return [face for face in read(picture) if is_upright(face)]


def bad_when_tilted(picture: Image) -> list[Face]:
    """Finds tilted heads, and more certainly than upright ones, but in a wrong place."""
    return [f if is_upright(f) else Face(f.box + 2, f.landmarks + 2, 0.99) for f in read(picture)]


def nonsense_when_tilted(picture: Image) -> list[Face]:
    """Says that lying heads are upright, with landmarks that no face has."""
    faces = read(picture)
    wrong = np.array([[0, 0], [3, 30], [20, 4], [2, 22], [25, 25.0]])
    return [f if is_upright(f) else Face(f.box, wrong + f.box[:2], 0.99) for f in faces]


@pytest.mark.parametrize("detector", [upright_only, bad_when_tilted, nonsense_when_tilted])
@pytest.mark.parametrize("degrees", [0, 20, 90, 120, 180, 200, 270, 300])
def test_turned_heads_are_found_to_the_pixel(detector: Callable[[Image], list[Face]], degrees: float) -> None:
    face = whole(face_at(95, 77, 90, degrees))
    found = find_faces(detector, drawn(face), turn=True)
    assert len(found) == 1
    assert np.array_equal(found[0].landmarks, face.landmarks)
    assert np.array_equal(found[0].box, read(drawn(face))[0].box)


@pytest.mark.parametrize("quarters", QUARTERS)
def test_points_go_back_to_their_pixels(quarters: int) -> None:
    picture = np.arange(WIDTH * HEIGHT * 3).reshape(HEIGHT, WIDTH, 3).astype(np.uint16)
    turned = np.asarray(cv2.rotate(picture, QUARTERS[quarters]))
    rng = np.random.RandomState(quarters)
    points = np.stack([rng.randint(0, turned.shape[1], 5), rng.randint(0, turned.shape[0], 5)], 1)
    back = turned_back(Face(np.array([1.0, 2, 11, 22]), points.astype(float), 1.0), quarters, WIDTH, HEIGHT)
    x, y = back.landmarks.astype(int).T
    assert np.array_equal(picture[y, x], turned[points[:, 1], points[:, 0]])
    assert (back.width, back.height) == ((20, 10) if quarters % 2 else (10, 20))


@given(st.floats(-179, 179), st.floats(10, 500))
def test_pose(degrees: float, size: float) -> None:
    tilt, misfit = pose(face_at(50, 60, size, degrees))
    assert np.rad2deg(tilt) == pytest.approx(degrees, abs=1e-6)
    assert misfit == pytest.approx(0, abs=1e-9)


def test_an_upright_picture_is_looked_at_once() -> None:
    calls = []

    def count(picture: Image) -> list[Face]:
        calls.append(picture.shape)
        return read(picture)

    find_faces(count, drawn(whole(face_at(95, 77, 90))), turn=True)
    assert len(calls) == 1
    assert find_faces(count, drawn(), turn=True) == []
    assert len(calls) == 5
    assert find_faces(count, drawn()) == []
    assert len(calls) == 6


def test_box() -> None:
    box = Box(10, 20, 30, 40)
    for x, y, inside in ((25, 40, True), (9, 40, False), (41, 40, False), (25, 19, False), (25, 61, False)):
        assert box.holds(face_at(x, y, 100)) is inside
    # The box covers pixels 10 to 39, whose centres those numbers are.
    assert box.holds(face_at(10, 40, 100))
    assert box.holds(face_at(39, 40, 100))
    assert not box.holds(face_at(40, 40, 100))


def test_a_face_that_shows_only_in_the_box() -> None:
    face = whole(face_at(150, 70, 60))

    def near(picture: Image) -> list[Face]:
        return read(picture) if picture.shape[1] < 150 else []

    picture = drawn(face)
    assert find_faces(near, picture) == []
    found = find_faces(near, picture, Box(130, 50, 40, 40))
    assert [f.landmarks.tolist() for f in found] == [face.landmarks.tolist()]
    assert find_faces(near, picture, Box(0, 0, 40, 40)) == []
    assert find_faces(near, picture, Box(900, 900, 40, 40)) == []


def test_a_lying_face_that_shows_only_in_the_box() -> None:
    face = whole(face_at(150, 70, 60, 90))

    def near(picture: Image) -> list[Face]:
        return upright_only(picture) if max(picture.shape) < 150 else []

    found = find_faces(near, drawn(face), Box(130, 50, 40, 40), turn=True)
    assert [f.landmarks.tolist() for f in found] == [face.landmarks.tolist()]


def test_parsing_a_box() -> None:
    assert parse_box("1, 2.5,30,40") == Box(1, 2.5, 30, 40)


@pytest.mark.parametrize("text", ["", "1,2,3", "1,2,3,4,5", "a,b,c,d", "1,2,0,5", "1,2,3,-4", "nan,0,1,1", "0,0,inf,1"])
def test_wrong_boxes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_box(text)
