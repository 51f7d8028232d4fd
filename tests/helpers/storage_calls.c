/* Sees every system call of this process that changes files below one folder.
 *
 * A seccomp filter turns such calls into SIGSYS, whoever makes them: Python, or Rust code that goes
 * past libc, of which an LD_PRELOAD library would see nothing (safetensors renames that way).  The
 * handler counts the call, writes it to a trace, and lets it through, or at call number `limit`
 * ends the process or refuses.  The handler's own calls carry MAGIC in their sixth argument, which
 * none of these calls has, and pass the filter.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#define MAGIC 0x5eed5eed5eed5eedULL
#define PATH 1024

/* What happens at call `limit`; a short write takes half of the bytes and says so. */
enum { WATCH, KILL_BEFORE, KILL_AMID, FAIL_ONCE, FAIL_ON, SHORT };
enum { CREATE = 1, EMPTY, WRITE, RESIZE, RENAME, UNLINK, RMDIR, MKDIR, SYNC, MARK, UNKNOWN };

struct record {  /* followed by two paths and by the bytes written at `place` */
    int32_t kind, failed;
    int64_t number, place;
    uint32_t first, second, bytes, zero;
};

static char root[PATH];
static size_t root_length;
static int mode, refusal, trace = -1;
static long limit, count;

static long raw(long call, long a, long b, long c, long d, long e)
{
    long result = syscall(call, a, b, c, d, e, MAGIC);
    return result < 0 ? -errno : result;
}

static void record(int kind, int failed, long number, long place, const char *first,
                   const char *second, const void *data, size_t bytes)
{
    struct record head = {kind, failed, number, place, strlen(first), strlen(second), bytes, 0};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)first, head.first},
                            {(void *)second, head.second}, {(void *)data, bytes}};
    if (trace >= 0)
        raw(SYS_writev, trace, (long)parts, 4, 0, 0);
}

static int below(const char *path)
{
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The path of an open file as it is now, and whether it lies below the folder. */
static int path_of(int file, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH - 1);
    path[length < 0 ? 0 : length] = 0;
    return below(path);
}

static int absolute(int folder, const char *path, char *whole)
{
    char start[PATH];
    int held = -1, used = 0;
    if (sscanf(path, "/proc/self/fd/%d/%n", &held, &used) == 1 && used) {
        path_of(held, start);  /* a name in an opened folder */
        if (snprintf(whole, PATH, "%s/%s", start, path + used) >= PATH)
            whole[0] = 0;
    } else if (path[0] == '/') {
        snprintf(whole, PATH, "%s", path);
    } else {
        if (folder == AT_FDCWD) {
            if (!getcwd(start, PATH))
                start[0] = 0;
        } else {
            path_of(folder, start);
        }
        if (snprintf(whole, PATH, "%s/%s", start, path) >= PATH)
            whole[0] = 0;
    }
    return below(whole);
}

static int exists(const char *path)
{
    struct stat found;
    return !lstat(path, &found);
}

static void end_process(void)
{
    raw(SYS_kill, getpid(), SIGKILL, 0, 0, 0);
    for (;;)
        pause();
}

/* Whether a call that takes room, or any call, is refused from `limit` on. */
static int refused(int kind, long number)
{
    int takes_room = kind == CREATE || kind == WRITE || kind == MKDIR || kind == RESIZE;
    if (mode == FAIL_ONCE)
        return number == limit;
    return mode == FAIL_ON && number >= limit && (takes_room || refusal == EIO);
}

/* Make the call, unless it is the one at which the process ends or which is refused. */
static long make(int kind, const char *first, const char *second, int file, long call,
                 long a, long b, long c, long d, long e)
{
    long number = ++count;
    if (mode == KILL_BEFORE && number == limit)
        end_process();
    int write = kind == WRITE && (call == SYS_write || call == SYS_pwrite64);
    int amid = number == limit && write && c > 1;
    if (amid && (mode == KILL_AMID || mode == FAIL_ON || mode == SHORT))
        c /= 2;
    else if (refused(kind, number)) {
        record(kind, refusal, number, 0, first, second, "", 0);
        return -refusal;
    }
    long place = 0, result = 0;
    struct stat found;
    if (kind == RESIZE || call == SYS_pwrite64)
        place = kind == RESIZE ? b : d;
    else if (kind == WRITE && !fstat(file, &found))
        place = fcntl(file, F_GETFL) & O_APPEND ? found.st_size : lseek(file, 0, SEEK_CUR);
    if (kind != SYNC)  /* what a sync does is taken from the trace */
        result = raw(call, a, b, c, d, e);
    int wrote = write && result > 0;
    record(kind, result < 0 ? -result : 0, number, place, first, second, wrote ? (void *)b : "",
           wrote ? result : 0);
    if (mode == KILL_AMID && number == limit)
        end_process();
    return result;
}

static long opened(int folder, const char *name, long flags, long call, long a, long b, long c,
                   long d)
{
    char path[PATH];
    if (!(flags & (O_CREAT | O_TRUNC)) || !absolute(folder, name, path))
        return raw(call, a, b, c, d, 0);
    int there = exists(path);
    if (!there && flags & O_CREAT)
        return make(CREATE, path, "", -1, call, a, b, c, d, 0);
    if (there && flags & O_TRUNC)
        return make(EMPTY, path, "", -1, call, a, b, c, d, 0);
    return raw(call, a, b, c, d, 0);
}

static long renamed(int from, const char *old, int to, const char *new, long call, const long *a)
{
    char first[PATH], second[PATH];
    int inside = absolute(from, old, first), there = absolute(to, new, second);
    if ((!inside && !there) || !exists(first))
        return raw(call, a[0], a[1], a[2], a[3], a[4]);
    int kind = inside && there && (call != SYS_renameat2 || !a[4]) ? RENAME : UNKNOWN;
    return make(kind, first, second, -1, call, a[0], a[1], a[2], a[3], a[4]);
}

/* A name that goes or a folder that comes; what cannot succeed changes nothing and is not counted. */
static long named(int kind, int folder, const char *name, long call, const long *a)
{
    char path[PATH];
    int there = absolute(folder, name, path) ? exists(path) : -1;
    if (there < 0 || there == (kind == MKDIR))
        return raw(call, a[0], a[1], a[2], a[3], a[4]);
    return make(kind, path, "", -1, call, a[0], a[1], a[2], a[3], a[4]);
}

static long on_file(int kind, int file, long call, const long *a)
{
    char path[PATH];
    if (!path_of(file, path))
        return raw(call, a[0], a[1], a[2], a[3], a[4]);
    return make(kind, path, "", file, call, a[0], a[1], a[2], a[3], a[4]);
}

static long handle(long call, const long *a)
{
    char path[PATH];
    switch (call) {
    case SYS_open:
        return opened(AT_FDCWD, (char *)a[0], a[1], call, a[0], a[1], a[2], 0);
    case SYS_creat: return opened(AT_FDCWD, (char *)a[0], O_CREAT | O_TRUNC, call, a[0], a[1], 0, 0);
    case SYS_openat: return opened(a[0], (char *)a[1], a[2], call, a[0], a[1], a[2], a[3]);
    case SYS_write: case SYS_pwrite64: return on_file(WRITE, a[0], call, a);
    case SYS_ftruncate: return on_file(RESIZE, a[0], call, a);
    case SYS_fsync: case SYS_fdatasync: return on_file(SYNC, a[0], call, a);
    case SYS_truncate:
        if (!absolute(AT_FDCWD, (char *)a[0], path) || !exists(path))
            return raw(call, a[0], a[1], 0, 0, 0);
        return make(RESIZE, path, "", -1, call, a[0], a[1], 0, 0, 0);
    case SYS_rename: return renamed(AT_FDCWD, (char *)a[0], AT_FDCWD, (char *)a[1], call, a);
    case SYS_renameat: case SYS_renameat2:
        return renamed(a[0], (char *)a[1], a[2], (char *)a[3], call, a);
    case SYS_unlink: return named(UNLINK, AT_FDCWD, (char *)a[0], call, a);
    case SYS_unlinkat:
        return named(a[2] & AT_REMOVEDIR ? RMDIR : UNLINK, a[0], (char *)a[1], call, a);
    case SYS_rmdir: return named(RMDIR, AT_FDCWD, (char *)a[0], call, a);
    case SYS_mkdir: return named(MKDIR, AT_FDCWD, (char *)a[0], call, a);
    case SYS_mkdirat: return named(MKDIR, a[0], (char *)a[1], call, a);
    /* Ways to change files that nothing uses today and the trace could not follow. */
    case SYS_link: return named(UNKNOWN, AT_FDCWD, (char *)a[0], call, a);
    case SYS_linkat: return named(UNKNOWN, a[0], (char *)a[1], call, a);
    case SYS_sendfile: case SYS_writev: case SYS_pwritev: case SYS_fallocate:
    case SYS_sync_file_range: return on_file(UNKNOWN, a[0], call, a);
    case SYS_mmap:  /* all six arguments are its own: it could not be let through */
        path_of(a[4], path);
        record(UNKNOWN, ENOSYS, ++count, 0, path, "mmap", "", 0);
        return -ENOSYS;
    }
    return -ENOSYS;  /* symlink, copy_file_range, openat2, io_uring: told that there is none */
}

static void on_call(int number, siginfo_t *about, void *context)
{
    (void)number;
    int before = errno;
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    long a[] = {r[REG_RDI], r[REG_RSI], r[REG_RDX], r[REG_R10], r[REG_R8], r[REG_R9]};
    r[REG_RAX] = handle(about->si_syscall, a);
    errno = before;
}

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define LOAD_HIGH(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field) + 4)
#define IF(value, then, otherwise) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, then, otherwise)
#define PASS BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define STOP BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP)
#define ON(call) IF(call, 0, 1), STOP

/* Watch this process from now on; 0, or the errno of what could not be done. */
int storage_start(const char *folder, int what, long at, int error, const char *trace_path)
{
    struct sock_filter program[] = {
        LOAD(args[5]), IF((uint32_t)MAGIC, 0, 3),
        LOAD_HIGH(args[5]), IF((uint32_t)(MAGIC >> 32), 0, 1), PASS,
        LOAD(nr), IF(SYS_mmap, 0, 6),
        /* a shared mapping of a file that can be written to */
        LOAD(args[2]), BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_WRITE, 0, 3), LOAD(args[3]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_ANONYMOUS, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_SHARED, 1, 0), PASS,
        LOAD(nr),
        ON(SYS_open), ON(SYS_openat), ON(SYS_creat), ON(SYS_write), ON(SYS_pwrite64),
        ON(SYS_writev), ON(SYS_pwritev), ON(SYS_sendfile), ON(SYS_ftruncate), ON(SYS_truncate),
        ON(SYS_rename), ON(SYS_renameat), ON(SYS_renameat2), ON(SYS_unlink), ON(SYS_unlinkat),
        ON(SYS_rmdir), ON(SYS_mkdir), ON(SYS_mkdirat), ON(SYS_fsync), ON(SYS_fdatasync),
        ON(SYS_link), ON(SYS_linkat), ON(SYS_symlink), ON(SYS_symlinkat), ON(SYS_fallocate),
        ON(SYS_sync_file_range), ON(SYS_copy_file_range), ON(SYS_openat2), ON(SYS_io_uring_setup),
        ON(SYS_mmap), PASS,
    };
    struct sock_fprog filter = {sizeof program / sizeof program[0], program};
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO | SA_NODEFER};
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    mode = what, limit = at, refusal = error, count = 0;
    if (trace_path && (trace = open(trace_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) < 0)
        return errno;
    if (sigaction(SIGSYS, &action, NULL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
        return errno;
    return 0;
}

/* A remark in the trace: what the watched program has promised by now. */
void storage_mark(long value) { record(MARK, 0, count, value, "", "", "", 0); }

long storage_count(void) { return count; }
