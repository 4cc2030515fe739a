#include "base/limits.h"

#include <limits.h>
#include <stdint.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <optional>

namespace tensorferry {
namespace {

// The assumed size of a new thread's stack if `ulimit -s` is unlimited.
constexpr uint64_t usual_stack_nbytes = uint64_t{8} << 20;

using File = std::unique_ptr<FILE, int (*)(FILE*)>;

File opened(const std::string& path) { return {std::fopen(path.c_str(), "re"), &std::fclose}; }

std::optional<uint64_t> number_in(const std::string& path) {
  const File file = opened(path);
  unsigned long long number = 0;
  // In place of a number, the file of a limit has the word "max" if there is no limit.
  if (!file || std::fscanf(file.get(), "%llu", &number) != 1) return std::nullopt;
  return number;
}

std::optional<uint64_t> limit_of(int resource) {
  struct rlimit limit;
  if (::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  return limit.rlim_cur;
}

// Look for an exhausted limit of processes and threads (pids.max): in this process's cgroup and its parents, up to the
// mount point, where a container sees its own limit. Returns text for the message; it is empty if no such limit is
// found.
std::string told_pids_limit() {
  const File file = opened("/proc/self/cgroup");
  std::array<char, PATH_MAX> line;
  while (file && std::fgets(line.data(), static_cast<int>(line.size()), file.get())) {
    std::string text(line.data());
    text.resize(text.find_last_not_of('\n') + 1);
    const size_t name = text.find(':') + 1;
    const size_t path = text.find(':', name) + 1;
    if (name == 0 || path == 0) continue;
    const std::string controllers = text.substr(name, path - name - 1);
    if (!controllers.empty() && controllers != "pids") continue;
    const std::string root = controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/pids";
    for (std::string group = text.substr(path);; group.resize(group.rfind('/'))) {
      const std::string folder = root + (group == "/" ? "" : group);
      const auto limit = number_in(folder + "/pids.max");
      const auto count = number_in(folder + "/pids.current");
      if (limit && count && *count + 1 >= *limit) {
        return "; pids.max is " + std::to_string(*limit) + ", of which " + std::to_string(*count) + " are used";
      }
      if (group.find('/') == std::string::npos) break;
    }
  }
  return "";
}

// Return a message if the address space limit leaves no room for `nbytes` more bytes; otherwise nothing.
std::optional<std::string> told_address_space(uint64_t nbytes) {
  const auto limit = limit_of(RLIMIT_AS);
  const auto pages = number_in("/proc/self/statm");
  if (!limit) return std::nullopt;
  const uint64_t used = pages ? *pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) : *limit;
  if (nbytes <= *limit && used <= *limit - nbytes) return std::nullopt;
  return "likely cause: the address space limit (ulimit -v) is " + std::to_string(*limit) + " bytes, of which " +
         std::to_string(used) + " are used; remedy: ulimit -v unlimited";
}

}  // namespace

std::string why_no_thread() {
  const uint64_t stack = std::max(limit_of(RLIMIT_STACK).value_or(usual_stack_nbytes), usual_stack_nbytes);
  if (auto told = told_address_space(stack + usual_nbytes)) return *told;
  const auto processes = limit_of(RLIMIT_NPROC);
  return "likely cause: a limit on processes and threads, of the user (ulimit -u is " +
         (processes ? std::to_string(*processes) : "unlimited") +
         ") or of the container (docker --pids-limit, Kubernetes podPidsLimit" + told_pids_limit() +
         "); remedy: raise it";
}

std::string why_no_memory(uint64_t nbytes) { return told_address_space(nbytes).value_or(""); }

}  // namespace tensorferry
