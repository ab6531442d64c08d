"""The official files of the data sets, with their addresses and SHA-256 digests.

The addresses are from the data sets' own pages. The SHA-256 of each download is the published one,
which TensorFlow Datasets and torchvision also use. The SHA-256 of the contents was confirmed with
independent copies where available: Debian's dataset-fashion-mnist, and CIFAR-10 rebuilt from
lossless images.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """A file of a data set: its path in the data folder and the SHA-256 of its content.

    The content of a ``.gz`` file is its uncompressed data, as compression may differ.
    """

    path: str
    sha256: str


@dataclass(frozen=True)
class Download:
    """A download and the files it provides: itself, or the contents of an archive."""

    url: str
    size: int
    sha256: str
    files: tuple[File, ...]


@dataclass(frozen=True)
class Source:
    """The official web page of a data set, and its downloads."""

    page: str
    downloads: tuple[Download, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """All files of the data set."""
        return tuple(file for download in self.downloads for file in download.files)


def _fashion(name: str, size: int, sha256: str, content: str) -> Download:
    home = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    return Download(home + name, size, sha256, (File(f"fashion-mnist/{name}", content),))


def _svhn(name: str, size: int, sha256: str) -> Download:
    home = "http://ufldl.stanford.edu/housenumbers/"
    return Download(home + name, size, sha256, (File(f"svhn/{name}", sha256),))


def _cifar(name: str, sha256: str) -> File:
    return File(f"cifar-10-batches-bin/{name}.bin", sha256)


SOURCES: dict[str, Source] = {
    "fashion-mnist": Source(
        "https://github.com/zalandoresearch/fashion-mnist",
        (
            _fashion(
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            ),
            _fashion(
                "train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            ),
            _fashion(
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            ),
            _fashion(
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
    ),
    "cifar-10": Source(
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                (
                    _cifar(
                        "data_batch_1",
                        "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                    ),
                    _cifar(
                        "data_batch_2",
                        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                    ),
                    _cifar(
                        "data_batch_3",
                        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                    ),
                    _cifar(
                        "data_batch_4",
                        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                    ),
                    _cifar(
                        "data_batch_5",
                        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                    ),
                    _cifar(
                        "test_batch",
                        "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
                    ),
                ),
            ),
        ),
    ),
    "svhn": Source(
        "http://ufldl.stanford.edu/housenumbers/",
        (
            _svhn(
                "train_32x32.mat",
                182_040_794,
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            _svhn(
                "test_32x32.mat",
                64_275_384,
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
    ),
}
"""All data sets that are read from official files."""
