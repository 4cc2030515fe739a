#include "file/mapping.h"

#include <errno.h>
#include <sys/mman.h>

namespace tensorferry {
namespace {

constexpr size_t huge_nbytes = size_t{2} << 20;

size_t rounded_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Map one piece over reserved addresses. Returns 0 or the errno.
int map_piece(const Mapping::Piece& piece, char* at) {
  constexpr int flags = MAP_PRIVATE | MAP_FIXED;
  if (!piece.file) {
    if (::mmap(at, piece.nbytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0) == MAP_FAILED) return errno;
    // The return value does not matter: a kernel without huge pages returns EINVAL, and ordinary pages serve.
    if (piece.nbytes >= huge_nbytes) (void)::madvise(at, piece.nbytes, MADV_HUGEPAGE);
    return 0;
  }
  const auto lease = piece.file->lease();
  const int descriptor = lease ? piece.file->descriptor() : -1;
  void* mapped = ::mmap(at, piece.nbytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, descriptor,
                        static_cast<off_t>(piece.offset));
  return mapped == MAP_FAILED ? errno : 0;
}

// The address that the mapping's first byte must have, modulo 2 MiB. The kernel maps a huge page of the page cache as a
// whole only where the file offset and the address agree modulo its size (Linux, filemap_map_pmd).
size_t into_huge_page(const std::vector<Mapping::Piece>& pieces) {
  uint64_t before = 0;
  for (const Mapping::Piece& piece : pieces) {
    // If the difference is negative, it wraps around. The remainder is correct nevertheless, because huge_nbytes is a
    // power of two.
    if (piece.file) return (piece.offset - before) % huge_nbytes;
    before += piece.nbytes;
  }
  return 0;
}

}  // namespace

Result<std::unique_ptr<Mapping>> Mapping::create(const std::vector<Piece>& pieces) {
  size_t nbytes = 0;
  auto refused = [](const Piece& piece, int error_number, size_t expected) {
    return Fault{.error_number = error_number,
                 .operation = "mmap",
                 .path = piece.file ? piece.file->path() : std::string(),
                 .offset = piece.offset,
                 .expected = expected};
  };
  for (const Piece& piece : pieces) {
    if (piece.offset % page_nbytes() != 0) return refused(piece, EINVAL, piece.nbytes);  // as mmap does
    if (__builtin_add_overflow(nbytes, piece.nbytes, &nbytes)) return refused(piece, ENOMEM, piece.nbytes);
  }
  if (nbytes > SIZE_MAX / 2) return refused(pieces.front(), ENOMEM, nbytes);
  // Reserve the addresses first. MAP_FIXED replaces whatever is mapped at an address; within the reservation it cannot
  // replace memory of other code.
  const size_t used = rounded_up(nbytes, page_nbytes());
  const size_t granule = nbytes >= huge_nbytes ? huge_nbytes : page_nbytes();
  const size_t into = into_huge_page(pieces) % granule;
  const size_t reserved_nbytes = used + granule - page_nbytes();
  void* reserved = ::mmap(nullptr, reserved_nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return refused(pieces.front(), errno, nbytes);
  char* begin = static_cast<char*>(reserved);
  char* data = reinterpret_cast<char*>(rounded_up(reinterpret_cast<uintptr_t>(reserved) - into, granule) + into);
  // munmap fails only if the kernel lacks memory to split the mapping; the addresses then stay reserved.
  if (data > begin) (void)::munmap(begin, static_cast<size_t>(data - begin));
  char* const end = begin + reserved_nbytes;
  if (data + used < end) (void)::munmap(data + used, static_cast<size_t>(end - (data + used)));
  std::unique_ptr<Mapping> mapping(new Mapping(data, nbytes));
  char* at = data;
  for (const Piece& piece : pieces) {
    if (const int error_number = map_piece(piece, at)) return refused(piece, error_number, piece.nbytes);
    at += piece.nbytes;
  }
  return mapping;
}

void Mapping::forget(size_t begin, size_t end) {
  const size_t page = page_nbytes();
  const size_t first = rounded_up(begin, page);
  const size_t last = end / page * page;
  // madvise fails only for locked memory, which then stays until the mapping ends.
  if (first < last) (void)::madvise(data_ + first, last - first, MADV_DONTNEED);
}

Mapping::~Mapping() { (void)::munmap(data_, nbytes_); }  // fails only for wrong arguments

}  // namespace tensorferry
