// The clocks of a server, as a test wants them. Preloaded, it adds the seconds in the file $WALL_CLOCK to the time of day, whoever asks;
// the clocks since boot stay true, and so do timers on them. With $NO_TIMER no timer can be made, as by a kernel that has none.
// It asks the kernel and nobody else: the first to ask for the time are allocators, before any library is ready.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

static const int64_t true_time = 0;
static const volatile int64_t *offset_s = &true_time;

__attribute__((constructor)) static void read_from_now_on(void) {
    const char *path = getenv("WALL_CLOCK");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    // Without its file the server would run on the true time, and a test would prove nothing.
    if (file < 0) abort();
    void *page = mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) abort();
    offset_s = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += *offset_s;
    return failed;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to != NULL) *to = now.tv_sec;
    return now.tv_sec;
}

int timerfd_create(int clock, int flags) {
    if (getenv("NO_TIMER") == NULL) return (int)syscall(SYS_timerfd_create, clock, flags);
    errno = ENOSYS;
    return -1;
}

// A server loads its modules with RTLD_DEEPBIND: they would find the C library's clocks first.
void *dlopen(const char *file, int mode) {
    void *(*next)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    return next(file, mode & ~RTLD_DEEPBIND);
}
