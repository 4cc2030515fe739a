// Files alone: closing and its failures, names that are new, directories and their syncs.
#include "file/file.h"

#include <doctest/doctest.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "refused_calls.h"
#include "scheduling.h"

namespace tensorferry {
namespace {

// Runs `body` in a thread without root's rights over files.
void as_ordinary_user(const std::function<void()>& body) {
  std::thread([&] {
    if (::geteuid() == 0) {
      (void)::syscall(SYS_setfsgid, 65534);
      (void)::syscall(SYS_setfsuid, 65534);
    }
    body();
  }).join();
}

Result<std::shared_ptr<File>> open_with(const std::string& path, OpenOptions options) {
  return File::open(path, options);
}

const OpenOptions writing{.write = true, .create = true};

// Makes an empty file; File considers its name durable.
void lay(const std::string& path, mode_t mode = 0666) {
  auto file = open_with(path, writing);
  REQUIRE(file);
  (*file)->name_durable();
  REQUIRE(::chmod(path.c_str(), mode) == 0);
}

TEST_CASE("closing a file for writing reports the error of close(2) once, and closes every descriptor") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  for (int error_number : {ENOSPC, EDQUOT, EIO}) {
    const size_t before = File::open_descriptors();
    auto file = open_file(path, true);
    const int descriptor = file->descriptor();
    where_call_fails(SYS_close, static_cast<uint32_t>(descriptor), error_number, [&] {
      const auto fault = file->close();
      REQUIRE(fault);
      CHECK(fault->error_number == error_number);
      CHECK(std::string(fault->operation) == "close");
      CHECK(fault->path == path);
      CHECK_FALSE(file->close());
    });
    CHECK(file->descriptor() == -1);
    CHECK(File::open_descriptors() == before);
    ::close(descriptor);  // the filter kept the kernel from it
  }
}

TEST_CASE("the descriptor through the page cache is checked at close as well") {
  TemporaryDirectory directory;
  auto file = open_file(directory.file("file"), true);
  if (!file->direct()) {
    MESSAGE("no direct I/O here: there is one descriptor only");
    return;
  }
  auto buffered = file->buffered_descriptor();
  REQUIRE(buffered);
  where_call_fails(SYS_close, static_cast<uint32_t>(*buffered), EIO, [&] {
    const auto fault = file->close();
    REQUIRE(fault);
    CHECK(fault->error_number == EIO);
  });
  ::close(*buffered);
}

TEST_CASE("an interrupted close, and any close of a file for reading, is not an error") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  auto written = open_file(path, true);
  auto descriptor = written->descriptor();
  where_call_fails(SYS_close, static_cast<uint32_t>(descriptor), EINTR, [&] { CHECK_FALSE(written->close()); });
  ::close(descriptor);
  auto read = open_file(path, false);
  descriptor = read->descriptor();
  where_call_fails(SYS_close, static_cast<uint32_t>(descriptor), EIO, [&] { CHECK_FALSE(read->close()); });
  ::close(descriptor);
}

TEST_CASE("a closed file refuses every call, and closing it again has no effect") {
  TemporaryDirectory directory;
  auto file = open_file(directory.file("file"), true);
  CHECK_FALSE(file->close());
  CHECK_FALSE(file->close());
  CHECK(file->descriptor() == -1);
  CHECK(file->size().fault().error_number == EBADF);
  CHECK(file->buffered_descriptor().fault().error_number == EBADF);
  CHECK(file->preallocate(0, 4096)->error_number == EBADF);
  CHECK(file->truncate(0)->error_number == EBADF);
  CHECK(file->sync()->error_number == EBADF);
  CHECK_FALSE(file->directory());
}

TEST_CASE("a file that retires waits for its leases and gives no more") {
  TemporaryDirectory directory;
  auto file = open_file(directory.file("file"), true);
  {
    const auto lease = file->lease();
    CHECK(lease);
    CHECK_FALSE(file->retire(milliseconds(0)));
    CHECK_FALSE(file->lease());
  }
  CHECK(file->retire(milliseconds(0)));
  CHECK_FALSE(file->lease());
}

TEST_CASE("threads that close and use one file's descriptors leave none open") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  const size_t before = File::open_descriptors();
  for (int round = 0; round < 200; ++round) {
    auto file = open_file(path, true);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        if (thread % 2) {
          (void)file->close();
        } else {
          (void)file->buffered_descriptor();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    file.reset();
    CHECK(File::open_descriptors() == before);
  }
}

TEST_CASE("a name is new until it was made durable, whichever File asks") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  auto first = open_with(path, writing);
  auto second = open_with(path, writing);
  REQUIRE((first && second));
  CHECK((*first)->name_made());
  CHECK((*second)->name_made());
  (*second)->name_durable();
  CHECK_FALSE((*first)->name_made());
  CHECK_FALSE((*second)->name_made());
  CHECK_FALSE((*open_with(path, writing))->name_made());
}

TEST_CASE("a file that was there has no new name") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file"), link = directory.file("link");
  lay(path);
  REQUIRE(::symlink(path.c_str(), link.c_str()) == 0);
  for (const auto& name : {path, link})
    for (bool truncate : {false, true}) {
      auto options = writing;
      options.truncate = truncate;
      CHECK_FALSE((*open_with(name, options))->name_made());
    }
  CHECK_FALSE((*open_with(path, {.read = true}))->name_made());
}

TEST_CASE("exclusive creation, truncation and a link to nowhere make names") {
  TemporaryDirectory directory;
  auto options = writing;
  options.exclusive = true;
  const std::string exclusive = directory.file("exclusive");
  CHECK((*open_with(exclusive, options))->name_made());
  CHECK(open_with(exclusive, options).fault().error_number == EEXIST);
  options = writing;
  options.truncate = true;
  CHECK((*open_with(directory.file("truncated"), options))->name_made());
  const std::string target = directory.file("target"), link = directory.file("link");
  REQUIRE(::symlink(target.c_str(), link.c_str()) == 0);
  auto behind = open_with(link, writing);
  REQUIRE(behind);
  CHECK((*behind)->name_made());
  CHECK(::access(target.c_str(), F_OK) == 0);
}

TEST_CASE("truncation at open empties a file that was there") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  auto file = open_file(path, true);
  CHECK_FALSE(file->truncate(10'000));
  CHECK(**open_file(path, true)->size() == 10'000);
  auto options = writing;
  options.truncate = true;
  CHECK(**(*open_with(path, options))->size() == 0);
}

TEST_CASE("errors of opening are those of open(2) with O_CREAT") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file"), pipe = directory.file("pipe"), folder = directory.file("folder");
  lay(path, 0600);
  REQUIRE(::mkfifo(pipe.c_str(), 0666) == 0);
  REQUIRE(::mkdir(folder.c_str(), 0755) == 0);
  const std::string looped = directory.file("looped"), secret = directory.file("secret");
  REQUIRE(::symlink(looped.c_str(), looped.c_str()) == 0);
  lay(secret, 0);
  as_ordinary_user([&] {
    for (const auto& name : {folder, folder + "/", path + "/", path + "/below", folder + "/no/such", looped, pipe,
                             secret, folder + "/new", std::string(5000, 'x'), std::string()}) {
      if (::geteuid() != 0 && name == folder + "/new") continue;  // one's own folder: no error
      const int expected = ::open(name.c_str(), O_WRONLY | O_CREAT | O_NONBLOCK, 0666);
      const int error_number = errno;
      CAPTURE(name);
      REQUIRE(expected < 0);
      auto refused = open_with(name, writing);
      REQUIRE_FALSE(refused);
      CHECK(refused.fault().error_number == error_number);
    }
  });
  ::rmdir(folder.c_str());
}

TEST_CASE("files that fs.protected_regular forbids to open with O_CREAT stay forbidden") {
  if (::geteuid() != 0) {
    MESSAGE("needs root, to act as two users");
    return;
  }
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  const std::string parent = path.substr(0, path.rfind('/'));
  lay(path);
  REQUIRE(::chown(path.c_str(), 1234, 1234) == 0);
  REQUIRE(::chmod(parent.c_str(), 01777) == 0);
  as_ordinary_user([&] {
    const int plain = ::open(path.c_str(), O_WRONLY | O_CREAT | O_NONBLOCK, 0666);
    const int error_number = plain < 0 ? errno : 0;
    if (plain >= 0) ::close(plain);
    auto opened = open_with(path, writing);
    CHECK((opened ? 0 : opened.fault().error_number) == error_number);
    if (opened) CHECK_FALSE((*opened)->name_made());
    if (error_number == 0) MESSAGE("fs.protected_regular is off");
  });
}

TEST_CASE("many threads that make one name all consider it new") {
  TemporaryDirectory directory;
  for (int round = 0; round < 50; ++round) {
    const std::string path = directory.file("file" + std::to_string(round));
    std::vector<std::thread> threads;
    std::atomic<int> failures{0};
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        auto file = open_with(path, writing);
        if (!file || !(*file)->name_made()) ++failures;
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(failures == 0);
  }
}

TEST_CASE("a file's directory is the one behind symbolic links, and can be synced") {
  TemporaryDirectory directory, elsewhere;
  const std::string path = directory.file("file"), link = elsewhere.file("link");
  REQUIRE(::symlink(path.c_str(), link.c_str()) == 0);
  auto file = open_with(link, writing);
  REQUIRE(file);
  auto found = (*file)->directory();
  REQUIRE(found);
  CHECK(*found == path.substr(0, path.rfind('/')));
  CHECK_FALSE(sync_directory(*found, (*file)->descriptor(), path));
}

TEST_CASE("a directory's failed fsync is a fault, and one that a file system lacks is none") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  auto file = open_file(path, true);
  const auto parent = *file->directory();
  // The next descriptor is the lowest one that is free: the directory's.
  const int next = ::dup(0);
  ::close(next);
  for (int error_number : {EIO, ENOSPC}) {
    where_call_fails(SYS_fsync, static_cast<uint32_t>(next), error_number, [&] {
      const auto fault = sync_directory(parent, file->descriptor(), path);
      REQUIRE(fault);
      CHECK(fault->error_number == error_number);
      CHECK(std::string(fault->operation) == "fsync of the directory");
      CHECK(fault->path == path);
    });
  }
  for (int error_number : {EINVAL, ENOSYS, EOPNOTSUPP}) {
    where_call_fails(SYS_fsync, static_cast<uint32_t>(next), error_number,
                     [&] { CHECK_FALSE(sync_directory(parent, file->descriptor(), path)); });
  }
  where_call_fails(SYS_close, static_cast<uint32_t>(next), EIO, [&] {
    const auto fault = sync_directory(parent, file->descriptor(), path);
    REQUIRE(fault);
    CHECK(std::string(fault->operation) == "close of the directory");
  });
  ::close(next);
}

TEST_CASE("a directory that may not be read is synced by its file system, and that may fail") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  const std::string parent = path.substr(0, path.rfind('/'));
  auto file = open_file(path, true);
  REQUIRE(::chmod(parent.c_str(), 0333) == 0);
  as_ordinary_user([&] {
    REQUIRE(::open(parent.c_str(), O_RDONLY | O_DIRECTORY) < 0);
    CHECK_FALSE(sync_directory(parent, file->descriptor(), path));
    where_call_fails(SYS_syncfs, static_cast<uint32_t>(file->descriptor()), EIO, [&] {
      const auto fault = sync_directory(parent, file->descriptor(), path);
      REQUIRE(fault);
      CHECK(fault->error_number == EIO);
      CHECK(std::string(fault->operation) == "syncfs");
    });
  });
  REQUIRE(::chmod(parent.c_str(), 0755) == 0);
}

TEST_CASE("a forked child considers every name new, and does not hang on a lock of its parent") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  auto file = open_file(path, true);
  file->name_durable();
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    auto again = File::open(path, writing);
    ::_exit(again && (*again)->name_made() && !(*again)->close() ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("files that were opened for a request are counted until they are closed, and others are not") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  lay(path);
  const auto before = File::of_requests();
  {
    auto own = open_with(path, {.read = true});
    auto first = open_with(path, {.read = true, .for_request = true});
    auto second = File::from_descriptor((*own)->descriptor(), false, DirectMode::automatic, true);
    REQUIRE(second);
    CHECK(File::of_requests().open == before.open + 2);
    CHECK(File::of_requests().given_back == before.given_back);
    CHECK_FALSE((*first)->close());
    CHECK_FALSE((*first)->close());
    CHECK(File::of_requests().open == before.open + 1);
    CHECK(File::of_requests().given_back == before.given_back + 1);
  }
  CHECK(File::of_requests().open == before.open);
  CHECK(File::of_requests().given_back == before.given_back + 2);
}

}  // namespace
}  // namespace tensorferry
