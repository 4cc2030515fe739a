#include "memory/first_touch.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tensorferry {
namespace {

uintptr_t page_mask() {
  static const auto mask = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)) - 1;
  return mask;
}

}  // namespace

bool is_untouched(const char* memory, uint64_t nbytes) {
  std::array<unsigned char, 16384 + 1> pages;  // one more, for a range that begins within a page
  const uint64_t step_nbytes = pages.size() * (page_mask() + 1);
  const auto end = reinterpret_cast<uintptr_t>(memory) + nbytes;
  for (auto at = reinterpret_cast<uintptr_t>(memory) & ~page_mask(); at < end; at += step_nbytes) {
    const uint64_t length = std::min<uint64_t>(end - at, step_nbytes);
    // mincore fails with ENOMEM for addresses that are not mapped; there is nothing to touch then.
    if (::mincore(reinterpret_cast<void*>(at), length, pages.data()) != 0) return false;
    const auto last = pages.begin() + static_cast<ptrdiff_t>((length + page_mask()) / (page_mask() + 1));
    if (std::any_of(pages.begin(), last, [](unsigned char page) { return (page & 1) == 0; })) return true;
  }
  return false;
}

void touch(char* memory, uint64_t nbytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory) & ~page_mask();
  const auto end = reinterpret_cast<uintptr_t>(memory) + nbytes;
  // The return value does not matter: without this advice the kernel adds the pages at the first access.
  (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
}

}  // namespace tensorferry
